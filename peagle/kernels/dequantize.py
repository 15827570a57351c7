"""Widen the blocks of a GGUF file to float32, in PyTorch.

The arithmetic and its order are those of gguf.quants, so the values are the same bit by bit; for
the few rows of an embedding lookup, PyTorch is several times faster than NumPy.
"""

from collections.abc import Callable

import torch
from torch import Tensor

HALF_BYTES = 2


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at byte `start` of every block, as float32 [..., 1]."""
    return blocks[..., start : start + HALF_BYTES].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2, n]: the low four bits of all of them, then the high four."""
    return torch.stack([packed & 15, packed >> 4], -2)


def high_bits(packed: Tensor) -> Tensor:
    """4 bytes [..., 4] -> their 32 bits, each as 0 or 16: [..., 2, 16]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[..., None] >> shifts) & 1  # [..., 4, 8]
    return (bits << 4).flatten(-2).unflatten(-1, (2, 16))


def widen_q4_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[..., 2:]).to(torch.int8) - 8
    return codes * half(blocks, 0)[..., None]


def widen_q4_1(blocks: Tensor) -> Tensor:
    wide = nibbles(blocks[..., 4:]) * half(blocks, 0)[..., None]
    return wide.add_(half(blocks, 2)[..., None])


def widen_q5_0(blocks: Tensor) -> Tensor:
    codes = (nibbles(blocks[..., 6:]) | high_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return codes * half(blocks, 0)[..., None]


def widen_q5_1(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[..., 8:]) | high_bits(blocks[..., 4:8])
    return (codes * half(blocks, 0)[..., None]).add_(half(blocks, 2)[..., None])


def widen_q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8) * half(blocks, 0)


def widen_q4_k(blocks: Tensor) -> Tensor:
    """8 groups of 32 inputs; the scale and the minimum of a group take 6 bits each.

    Those of groups 0..3 are the low bits of bytes 0..3 and 4..7; of groups 4..7, the low and the
    high bits of bytes 8..11, with their two highest bits above those of groups 0..3.
    """
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], -1)  # [..., 8]
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], -1)
    codes = nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [..., 8, 32]
    wide = codes * (half(blocks, 0) * scales)[..., None]
    return wide.sub_((half(blocks, 2) * minima)[..., None])


def widen_q6_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 inputs, each with a scale of 8 bits; a code has 4 low and 2 high bits."""
    low = nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [..., 2, 2, 64]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3  # [..., 2, 4, 32]
    codes = low.flatten(-3) | (high << 4).flatten(-3)  # [..., 256]
    scales = half(blocks, 208) * blocks[..., 192:208].view(torch.int8)  # [..., 16]
    return (codes.to(torch.int8) - 32).unflatten(-1, (16, 16)) * scales[..., None]


WIDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": widen_q4_0,
    "Q4_1": widen_q4_1,
    "Q5_0": widen_q5_0,
    "Q5_1": widen_q5_1,
    "Q8_0": widen_q8_0,
    "Q4_K": widen_q4_k,
    "Q6_K": widen_q6_k,
}


def dequantize(blocks: Tensor, block_size: int, block_format: str) -> Tensor:
    """blocks [rows, bytes of a row] uint8 -> [rows, inputs] float32."""
    split = blocks.unflatten(1, (-1, block_size))  # [rows, blocks, bytes of a block]
    return WIDEN[block_format](split).reshape(len(blocks), -1)

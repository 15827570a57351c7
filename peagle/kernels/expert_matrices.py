"""ExpertMatrices: one projection of all experts of a layer, in the format in which it is stored.

| format | weight | scales |
|---|---|---|
| float | [E, N, K] in the dtype of the rows | none |
| fp8, int8 | [E, N, K] | [E, N] float32: one per output |
| mxfp4 | [E, N, K / 2] uint8: two codes, the first in the low bits | [E, N, K / 32] uint8 |

An MXFP4 code is a float of 4 bits (sign, two bits of exponent, one of mantissa). 32 inputs share a
scale: the exponent of a power of 2, plus 127.

    codes  0 1   2 3   4 5 6 7     8 .. 15: the same, negative
    value  0 0.5 1 1.5 2 3 4 6

For kernels on a GPU the bits of eight codes, four bytes, are shuffled, so that a shift and a mask
move a code to its place in a bf16 number. Bytes 0 and 2 give the low 16 bits of the four, bytes 1
and 3 the high ones. Their codes are, of the first byte (a even, c odd input) and of the second (b
and d), with sign s and magnitude mmm:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code   a  d  c  b  d  d  d  a  a  a  b  b  b  c  c  c
           s  s  s  s  m  m  m  m  m  m  m  m  m  m  m  m
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_BLOCK = 32  # inputs that share a scale
SCALE_ALIGNMENT = 16  # bytes
MAX_FAST_SCALE = 128  # the largest scale that the fast decoding on a GPU supports: a factor of 2
MXFP4_BIAS = 127  # of the exponents that are stored as scales
# Of the codes a, b, c and d above: where sign and magnitude begin in 16 bits.
SIGN_BITS = (15, 12, 13, 14)
MAGNITUDE_BITS = (6, 3, 0, 9)


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """gate * sigmoid(alpha * gate) * (up + up_shift), with gate and up clamped first.

    The defaults are those of SwiGLU; GPT-OSS has another alpha, a limit and a shift of 1.
    """

    interleaved: bool = False  # Outputs 0 2 4 .. are gates, 1 3 5 .. are ups; else gates come first
    alpha: float = 1.0
    limit: float | None = None  # gate <= limit, -limit <= up <= limit
    up_shift: float = 0.0

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """[.., 2I] -> gate and up, [.., I] each."""
        if self.interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, -1)
        return gate, up

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[.., 2I] -> [.., I], computed in float32 and rounded once."""
        gate, up = (x.float() for x in self.split(gate_up))
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + self.up_shift)).to(gate_up.dtype)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None  # [E, N]
    shuffled: bool = False  # of MXFP4: see above; no scale exceeds MAX_FAST_SCALE

    @property
    def is_mxfp4(self) -> bool:
        return self.weight.dtype == torch.uint8

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    @property
    def inputs(self) -> int:
        return self.weight.shape[2] * (2 if self.is_mxfp4 else 1)

    @property
    def expert_bytes(self) -> int:
        """Bytes that a product with one expert reads."""
        tensors = (self.weight, self.scales, self.bias)
        return sum(x[0].numel() * x.element_size() for x in tensors if x is not None)

    def for_gpu(self, dtype: torch.dtype) -> "ExpertMatrices":
        """The same for kernels on a GPU and rows of that dtype.

        Rows of MXFP4 scales begin at multiples of 16 bytes. Codes are shuffled for rows in bf16,
        unless scales are too large for the fast decoding.
        """
        if not self.is_mxfp4 or self.scales is None or self.shuffled:
            return self
        count = self.scales.shape[2]
        scales = pad(self.scales, (0, -count % SCALE_ALIGNMENT))[:, :, :count]
        is_fast = dtype == torch.bfloat16 and int(self.scales.max()) <= MAX_FAST_SCALE
        if not is_fast:
            return replace(self, scales=scales)
        weight = torch.empty_like(self.weight)
        for expert in range(self.num_experts):  # One after another, to save memory.
            weight[expert] = shuffle_codes(self.weight[expert])
        return replace(self, weight=weight, scales=scales, shuffled=True)

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] of one expert, multiplied out."""
        weight = self.weight[expert]
        if self.scales is None:
            return weight.to(dtype)
        scales = self.scales[expert]
        if not self.is_mxfp4:
            return (weight.float() * scales[:, None]).to(dtype)
        return decode_mxfp4(unshuffle_codes(weight) if self.shuffled else weight, scales, dtype)


def decode_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [.., K / 2] and scales [.., K / 32], both uint8 -> [.., K]"""
    table = torch.tensor([*MXFP4_VALUES, *(-x for x in MXFP4_VALUES)], device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)  # [.., K]
    exponents = scales.int() - MXFP4_BIAS
    blocks = values.unflatten(-1, (-1, MXFP4_BLOCK))
    return torch.ldexp(blocks, exponents[..., None]).flatten(-2).to(dtype)


def shuffle_codes(codes: Tensor) -> Tensor:
    """codes [.., K / 2] uint8, K a multiple of 8 -> the same bytes with shuffled bits."""
    words = codes.unflatten(-1, (-1, 2, 2)).int()  # [.., K / 8, (a, c) or (b, d), low or high]
    first, second = words.unbind(-2)
    halves = torch.zeros_like(first)
    parts = (first & 15, second & 15, first >> 4, second >> 4)
    for code, sign, magnitude in zip(parts, SIGN_BITS, MAGNITUDE_BITS, strict=True):
        halves |= (code >> 3) << sign | (code & 7) << magnitude
    return torch.stack([halves & 255, halves >> 8], -1).to(torch.uint8).flatten(-3)


def unshuffle_codes(codes: Tensor) -> Tensor:
    """The inverse of `shuffle_codes`."""
    low, high = codes.unflatten(-1, (-1, 2, 2)).int().unbind(-1)  # [.., K / 8, low or high half]
    halves = low | high << 8
    a, b, c, d = (
        (halves >> sign & 1) << 3 | halves >> magnitude & 7
        for sign, magnitude in zip(SIGN_BITS, MAGNITUDE_BITS, strict=True)
    )
    return torch.stack([a | c << 4, b | d << 4], -2).to(torch.uint8).flatten(-3)

"""Weights in one byte each: int8 rows, every row with a scale of its own.

A matrix `X` [rows, columns] is stored as int8 `X` and float32 `X.scale` [rows]; it stands for X * scale, symmetric and
without -128. Vectors (norms, biases, the mask's) stay as they are. The ids of a pruned vocabulary rise, so a bit for
each token of the target says the same: `target_ids.bits`, uint8, the first token in the lowest bit.
"""

import torch
from torch import Tensor

from peagle.errors import UserError

LEVELS = 127
CLIPS = (
    1.0,
    0.99,
    0.98,
    0.96,
    0.94,
    0.9,
    0.85,
    0.8,
    0.7,
)  # of a row's largest magnitude: outliers may be cut
SCALE, BITS = ".scale", "target_ids.bits"


def pack(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors as they are stored."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "target_ids" and bool((tensor.diff() > 0).all()):
            stored[BITS] = to_bits(tensor, vocab_size)
        elif tensor.is_floating_point() and tensor.ndim == 2:
            if not tensor.isfinite().all():
                raise UserError(
                    f"tensor {name} is not finite: such a drafter cannot be stored as int8"
                )
            stored[name], stored[name + SCALE] = quantize(tensor)
        else:
            stored[name] = tensor
    return stored


def unpack(stored: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors as they were, matrices in float32. A scale that is missing or makes no sense is refused."""
    tensors: dict[str, Tensor] = {}
    scales = {name + SCALE for name, tensor in stored.items() if tensor.dtype == torch.int8}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            tensors[name] = dequantize(name, tensor, stored.get(name + SCALE))
        elif name == BITS:
            tensors["target_ids"] = from_bits(tensor, vocab_size)
        elif name not in scales:
            tensors[name] = tensor
    return tensors


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and float32 [rows]: for each row the clip with the least squared error."""
    x = matrix.float()
    peak = x.abs().amax(1, keepdim=True)
    best = torch.full_like(peak, float("inf"))
    scale = torch.empty_like(peak)
    for clip in CLIPS:
        step = (peak * (clip / LEVELS)).clamp_min(
            torch.finfo(torch.float32).tiny
        )  # a row of zeros has one too
        error = (_codes(x, step) * step - x).square().sum(1, keepdim=True)
        scale = torch.where(error < best, step, scale)
        best = torch.minimum(error, best)
    return _codes(x, scale).to(torch.int8), scale[:, 0]


def _codes(x: Tensor, step: Tensor) -> Tensor:
    return (x / step).round().clamp(-LEVELS, LEVELS)


def dequantize(name: str, codes: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        raise UserError(
            f"tensor {name} is int8, but {name}{SCALE} is missing: write or copy the checkpoint again"
        )
    if codes.ndim != 2 or scale.shape != codes.shape[:1] or not scale.is_floating_point():
        raise UserError(
            f"{name}{SCALE} has shape {list(scale.shape)} and type {scale.dtype}, but {name} {list(codes.shape)} needs"
            " a floating-point number a row: write or copy the checkpoint again"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise UserError(
            f"{name}{SCALE} holds numbers that are not above 0: write or copy the checkpoint again"
        )
    return codes.float() * scale.float()[:, None]


def to_bits(ids: Tensor, vocab_size: int) -> Tensor:
    """Rising ids -> uint8 [ceil(vocab_size / 8)]"""
    marks = torch.zeros(-(-vocab_size // 8) * 8, dtype=torch.uint8)
    marks[ids.long().cpu()] = 1
    return (marks.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def from_bits(bits: Tensor, vocab_size: int) -> Tensor:
    if bits.dtype != torch.uint8 or bits.shape != (-(-vocab_size // 8),):
        raise UserError(
            f"{BITS} does not cover a vocabulary of {vocab_size}: write or copy the checkpoint again"
        )
    marks = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return marks.flatten().nonzero()[
        :, 0
    ]  # an id beyond the vocabulary is for Checkpoint.problems to tell

"""Drafter weights in one byte each: int8 matrices with one scale per row.

A matrix `X` [rows, columns] is stored as int8 `X` and float32 `X.scale` [rows]; its value is
X * scale, symmetric and without -128. Vectors (norms, biases, those of the mask) stay in floating
point. The ids of a pruned vocabulary are ascending, so one bit per token of the target is enough:
`target_ids.bits`, uint8, the first token in the lowest bit.
"""

import torch
from torch import Tensor

from peagle.errors import UserError

MAX_CODE = 127
# Candidate clipping points as fractions of a row's largest magnitude: cutting outliers may reduce
# the error of the other weights.
CLIP_FRACTIONS = (1.0, 0.99, 0.98, 0.96, 0.94, 0.9, 0.85, 0.8, 0.7)
SCALE = ".scale"
BITS = "target_ids.bits"
WRITE_AGAIN = "write or copy the checkpoint again"


def pack(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Encode tensors for the file."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "target_ids" and bool((tensor.diff() > 0).all()):
            stored[BITS] = to_bits(tensor, vocab_size)
        elif tensor.is_floating_point() and tensor.ndim == 2:
            require_finite(name, tensor)
            stored[name], stored[name + SCALE] = quantize(tensor)
        else:
            stored[name] = tensor
    return stored


def require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise UserError(
            f"tensor {name} is not finite everywhere: store the drafter in floating point"
        )


def unpack(stored: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Decode tensors of the file, matrices to float32.

    Missing or invalid scales raise a UserError.
    """
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
    """Return codes int8 [rows, columns] and scales float32 [rows].

    Each row uses the clipping point with the least squared error.
    """
    x = matrix.float()
    peak = x.abs().amax(1, keepdim=True)
    least_error = torch.full_like(peak, float("inf"))
    scale = torch.empty_like(peak)
    smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a positive scale, too
    for clip in CLIP_FRACTIONS:
        step = (peak * (clip / MAX_CODE)).clamp_min(smallest)
        error = (_codes(x, step) * step - x).square().sum(1, keepdim=True)
        scale = torch.where(error < least_error, step, scale)
        least_error = torch.minimum(error, least_error)
    return _codes(x, scale).to(torch.int8), scale[:, 0]


def _codes(x: Tensor, step: Tensor) -> Tensor:
    return (x / step).round().clamp(-MAX_CODE, MAX_CODE)


def dequantize(name: str, codes: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        raise UserError(f"tensor {name} is int8, but {name}{SCALE} is missing: {WRITE_AGAIN}")
    if codes.ndim != 2 or scale.shape != codes.shape[:1] or not scale.is_floating_point():
        raise UserError(
            f"{name}{SCALE} has shape {list(scale.shape)} and type {scale.dtype}, but {name}"
            f" {list(codes.shape)} needs one floating-point number per row: {WRITE_AGAIN}"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise UserError(f"{name}{SCALE} has numbers that are not above 0: {WRITE_AGAIN}")
    return codes.float() * scale.float()[:, None]


def to_bits(ids: Tensor, vocab_size: int) -> Tensor:
    """Ascending ids -> uint8 [ceil(vocab_size / 8)]."""
    marks = torch.zeros(-(-vocab_size // 8) * 8, dtype=torch.uint8)
    marks[ids.long().cpu()] = 1
    return (marks.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def from_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """The inverse of `to_bits`."""
    if bits.dtype != torch.uint8 or bits.shape != (-(-vocab_size // 8),):
        raise UserError(f"{BITS} does not cover a vocabulary of {vocab_size}: {WRITE_AGAIN}")
    marks = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    # Checkpoint.problems reports ids beyond the vocabulary.
    return marks.flatten().nonzero()[:, 0]

"""Drafter weights in half a byte each: 4-bit matrices with a scale per group of inputs.

A matrix `X` [rows, columns] is stored as uint8 `X` [rows, columns / 2], int8 `X.group_scale` [rows,
groups] and float32 `X.scale` [rows]:

    value[r, c] = code[r, c] * group_scale[r, c // group] * scale[r],   code in -8..7

A byte holds two codes plus 8 each, the one of the even column in its low half. A scale may be
negative, so that the largest weight of a group, of either sign, can have the code -8. A group of 32
takes 4.25 bits per weight. Matrices that are not stored this way are as int8.py describes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafter.formats import int8
from peagle.drafter.formats.int8 import SCALE, WRITE_AGAIN
from peagle.drafter.formats.row_format import RowFormat
from peagle.errors import UserError

MIN_CODE = -8
MAX_CODE = 7
MAX_GROUP_SCALE = 127
GROUP_SCALE = ".group_scale"
# Candidate scales, as fractions of the one with which a group's largest weight has the code -8.
CLIP_FRACTIONS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7)


class Int4Rows(NamedTuple):
    codes: Tensor  # uint8 [rows, columns / 2]
    group_scale: Tensor  # int8 [rows, groups]
    scale: Tensor  # float32 [rows]


def pack(tensors: dict[str, Tensor], vocab_size: int, rows: RowFormat) -> dict[str, Tensor]:
    """Encode tensors for the file."""
    four_bit = {name for name, tensor in tensors.items() if rows.is_four_bit(name, tensor)}
    others = {name: tensor for name, tensor in tensors.items() if name not in four_bit}
    stored = int8.pack(others, vocab_size)
    for name in four_bit:
        int8.require_finite(name, tensors[name])
        packed = quantize(tensors[name], rows.group)
        stored[name], stored[name + GROUP_SCALE], stored[name + SCALE] = packed
    return stored


def unpack(stored: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Decode tensors of the file, matrices to float32.

    Missing or invalid scales raise a UserError.
    """
    others = dict(stored)
    decoded: dict[str, Tensor] = {}
    for name, codes in stored.items():
        if codes.dtype == torch.uint8 and name != int8.BITS:
            parts = [others.pop(name + suffix, None) for suffix in ("", GROUP_SCALE, SCALE)]
            decoded[name] = dequantize(name, codes, *parts[1:])
        elif name.endswith(GROUP_SCALE) and name.removesuffix(GROUP_SCALE) not in stored:
            raise UserError(
                f"tensor {name.removesuffix(GROUP_SCALE)} of {name} is missing: {WRITE_AGAIN}"
            )
    return decoded | int8.unpack(others, vocab_size)


def quantize(matrix: Tensor, group: int) -> Int4Rows:
    """Encode a matrix [rows, columns] whose columns are a multiple of `group`."""
    x = _in_groups(matrix, group)
    group_scale, scale = _quantized_scales(x)
    codes = _codes(x, group_scale * scale).to(torch.int8).view(len(matrix), -1)
    return Int4Rows(_pack_codes(codes), group_scale[:, :, 0].to(torch.int8), scale[:, 0, 0])


def stored_scales(matrix: Tensor, group: int) -> Tensor:
    """[rows, groups, 1]: the scales with which `quantize` encodes."""
    group_scale, scale = _quantized_scales(_in_groups(matrix, group))
    return group_scale * scale


def rounded(matrix: Tensor, scales: Tensor) -> Tensor:
    """What a matrix is after encoding with these scales and decoding."""
    x = _in_groups(matrix, matrix.shape[1] // scales.shape[1])
    return (_codes(x, scales) * scales).view_as(matrix)


def _in_groups(matrix: Tensor, group: int) -> Tensor:
    return matrix.float().view(len(matrix), -1, group)  # [rows, groups, group]


def _quantized_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integer scales of groups [rows, groups, 1], and those of rows [rows, 1, 1]."""
    wanted = _group_scales(x)
    smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a positive scale, too
    scale = (wanted.abs().amax(1, keepdim=True) / MAX_GROUP_SCALE).clamp_min(smallest)
    return (wanted / scale).round().clamp(-MAX_GROUP_SCALE, MAX_GROUP_SCALE), scale


def _group_scales(x: Tensor) -> Tensor:
    """x [rows, groups, group] -> [rows, groups, 1]: the scale with the least squared error.

    Each candidate gives codes, and least squares give the best scale for these codes.
    """
    peak = x.abs().amax(2, keepdim=True)
    least_error = torch.full_like(peak, float("inf"))
    scale = torch.zeros_like(peak)
    for clip in CLIP_FRACTIONS:
        for sign in (-1, 1):
            codes = _codes(x, peak * (clip / MIN_CODE * sign))
            fitted = (codes * x).sum(2, keepdim=True) / codes.square().sum(
                2, keepdim=True
            ).clamp_min(1)
            error = (codes * fitted - x).square().sum(2, keepdim=True)
            scale = torch.where(error < least_error, fitted, scale)
            least_error = torch.minimum(error, least_error)
    return scale


def _codes(x: Tensor, step: Tensor) -> Tensor:
    """The nearest codes; 0 where the step is 0."""
    codes = (x / step.where(step != 0, 1)).round().clamp(MIN_CODE, MAX_CODE)
    return codes * (step != 0)


def _pack_codes(codes: Tensor) -> Tensor:
    """int8 [rows, columns] -> uint8 [rows, columns / 2]: codes -8, 7 -> the byte 0xf0."""
    nibbles = (codes - MIN_CODE).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def _unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `_pack_codes`, in float32."""
    nibbles = torch.stack([packed & 15, packed >> 4], 2)  # [rows, columns / 2, 2]
    return nibbles.view(len(packed), -1).float() + MIN_CODE


def dequantize(
    name: str, codes: Tensor, group_scale: Tensor | None, scale: Tensor | None
) -> Tensor:
    if group_scale is None:
        raise UserError(
            f"tensor {name} has 4 bits, but {name}{GROUP_SCALE} is missing: {WRITE_AGAIN}"
        )
    if (
        codes.ndim != 2
        or group_scale.dtype != torch.int8
        or group_scale.ndim != 2
        or len(group_scale) != len(codes)
        or group_scale.shape[1] == 0
        or 2 * codes.shape[1] % group_scale.shape[1] != 0
    ):
        raise UserError(
            f"{name}{GROUP_SCALE} has shape {list(group_scale.shape)} and type {group_scale.dtype},"
            f" but the codes {list(codes.shape)} of {name} need int8 of equal groups per row:"
            f" {WRITE_AGAIN}"
        )
    group_scales = int8.dequantize(name, group_scale, scale)  # [rows, groups]
    values = _unpack_codes(codes).view(*group_scales.shape, -1) * group_scales[:, :, None]
    return values.view(len(codes), -1)

"""The tensors of quantized weights in a checkpoint: names and shapes of compressed-tensors.

    float-quantized, int-quantized   X.weight [N, K] in 8 bits, X.weight_scale [N, 1]
    pack-quantized                   X.weight_packed [N, K * bits / 32] int32,
                                     X.weight_scale [N, groups], X.weight_shape [2] = N, K

A packed code is stored with half the range added, the first input in the lowest bits. Zero points,
reordered inputs and two-dimensional blocks are refused.
"""

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.target.quantized.codes import QuantizedWeight
from peagle.target.quantized.formats import WeightFormat

WEIGHT = ".weight"
PACKED = ".weight_packed"
SCALE = ".weight_scale"
SHAPE = ".weight_shape"
CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
UNSUPPORTED = (
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
    ".input_global_scale",
)
QUANTIZE_AGAIN = "quantize the target again with `peagle quantize`"


def weight_tensors(name: str, weight: QuantizedWeight, format: WeightFormat) -> dict[str, Tensor]:
    """The tensors that store the weight of module `name`."""
    if format.layout != "pack-quantized":
        return {name + WEIGHT: weight.codes, name + SCALE: weight.scales}
    return {
        name + PACKED: pack_codes(weight.codes, format.bits),
        name + SCALE: weight.scales,
        name + SHAPE: torch.tensor(weight.codes.shape),
    }


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int8 [N, K] -> int32 [N, K * bits / 32]."""
    per_word = 32 // bits
    unsigned = (codes.long() + (1 << bits - 1)).view(len(codes), -1, per_word)
    words = unsigned << torch.arange(0, 32, bits)
    return words.sum(2).to(torch.int32)  # the highest bit becomes the sign


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """int32 [N, K * bits / 32] -> int8 [N, K]."""
    parts = (words[:, :, None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
    return (parts - (1 << bits - 1)).to(torch.int8).flatten(1)


def parse_quantized(
    tensors: dict[str, Tensor],
) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor]]:
    """Split tensors into quantized weights by module and other tensors by name."""
    if unsupported := sorted(name for name in tensors if name.endswith(UNSUPPORTED)):
        raise UserError(
            f"tensor {unsupported[0]} is not supported: only symmetric rows and groups are read,"
            f" without reordering. To continue, {QUANTIZE_AGAIN}"
        )
    weights: dict[str, QuantizedWeight] = {}
    others = dict(tensors)
    for name in [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]:
        scales = others.pop(name + SCALE)
        codes: Tensor | None
        if name + PACKED in others:
            codes = _unpack(name, others.pop(name + PACKED), others.pop(name + SHAPE, None))
        else:
            codes = others.pop(name + WEIGHT, None)
        weights[name] = _checked_weight(name, codes, scales)
    if orphans := sorted(
        name for name, x in others.items() if x.dtype in CODE_DTYPES or name.endswith(PACKED)
    ):
        raise UserError(f"tensor {orphans[0]} has no {SCALE[1:]} beside it: {QUANTIZE_AGAIN}")
    return weights, others


def _unpack(name: str, words: Tensor, shape: Tensor | None) -> Tensor:
    if shape is None or shape.numel() != 2 or words.ndim != 2 or words.dtype != torch.int32:
        raise UserError(f"{name}{PACKED} and {name}{SHAPE} do not match: {QUANTIZE_AGAIN}")
    n, k = shape.tolist()
    for bits in (4, 8):
        if words.shape == (n, k * bits // 32) and k * bits % 32 == 0:
            return unpack_codes(words, bits)
    raise UserError(
        f"{name}{PACKED} {list(words.shape)} is not a matrix of {n} x {k} in 4 or 8 bits:"
        f" {QUANTIZE_AGAIN}"
    )


def _checked_weight(name: str, codes: Tensor | None, scales: Tensor) -> QuantizedWeight:
    if codes is None or codes.dtype not in CODE_DTYPES or codes.ndim != 2:
        actual = "missing" if codes is None else f"{codes.dtype} {list(codes.shape)}"
        raise UserError(
            f"{name}{WEIGHT} is {actual}, but {name}{SCALE} needs a matrix in 8 bits:"
            f" {QUANTIZE_AGAIN}"
        )
    n, k = codes.shape
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1)
    if scales.ndim != 2 or len(scales) != n or not scales.shape[1] or k % scales.shape[1]:
        raise UserError(
            f"{name}{SCALE} {list(scales.shape)} does not fit a matrix of {n} x {k}:"
            f" {QUANTIZE_AGAIN}"
        )
    if not scales.is_floating_point() or not (scales.isfinite() & (scales > 0)).all():
        raise UserError(f"{name}{SCALE} has numbers that are not above 0: {QUANTIZE_AGAIN}")
    return QuantizedWeight(codes, scales)

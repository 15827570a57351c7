"""Codes as a checkpoint stores them: compressed-tensors' names and shapes.

    float-quantized, int-quantized   X.weight [N, K] in 8 bits, X.weight_scale [N, 1]
    pack-quantized                   X.weight_packed [N, K * bits / 32] int32, the first input in the lowest bits, with
                                     half the range added; X.weight_scale [N, groups]; X.weight_shape [2] = N, K

What has zero points, an order of its own, or blocks in two directions is refused: it is not read as something else.
"""

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.target.quantized.codes import QuantizedWeight
from peagle.target.quantized.formats import WeightFormat

WEIGHT, PACKED, SCALE, SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
SMALL = (torch.int8, torch.float8_e4m3fn)
FOREIGN = (".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".input_global_scale")
AGAIN = "quantize the target again with `peagle quantize`"


def weight_tensors(name: str, codes: QuantizedWeight, to: WeightFormat) -> dict[str, Tensor]:
    """The tensors of module `name`."""
    if to.layout != "pack-quantized":
        return {name + WEIGHT: codes.codes, name + SCALE: codes.scales}
    shape = torch.tensor(codes.codes.shape)
    return {
        name + PACKED: pack_codes(codes.codes, to.bits),
        name + SCALE: codes.scales,
        name + SHAPE: shape,
    }


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int8 [N, K] -> int32 [N, K * bits / 32]"""
    each = 32 // bits
    words = (codes.long() + (1 << bits - 1)).view(len(codes), -1, each) << torch.arange(0, 32, bits)
    return words.sum(2).to(torch.int32)  # the highest bit becomes the sign


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    parts = (words[:, :, None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
    return (parts - (1 << bits - 1)).to(torch.int8).flatten(1)


def parse_quantized(tensors: dict[str, Tensor]) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor]]:
    """The codes by module, and what is stored plainly by its name."""
    plain, found = dict(tensors), dict[str, QuantizedWeight]()
    if foreign := sorted(name for name in tensors if name.endswith(FOREIGN)):
        raise UserError(
            f"tensor {foreign[0]}: we read symmetric rows and groups alone, without an order. {AGAIN}"
        )
    for name in [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]:
        scales = plain.pop(name + SCALE)
        if name + PACKED in plain:
            codes = _from_words(name, plain.pop(name + PACKED), plain.pop(name + SHAPE, None))
            found[name] = _checked(name, codes, scales)
        else:
            found[name] = _checked(name, plain.pop(name + WEIGHT, None), scales)
    if orphans := sorted(
        name for name, x in plain.items() if x.dtype in SMALL or name.endswith(PACKED)
    ):
        raise UserError(f"tensor {orphans[0]} has no {SCALE[1:]} beside it: {AGAIN}")
    return found, plain


def _from_words(name: str, words: Tensor, shape: Tensor | None) -> Tensor:
    if shape is None or shape.numel() != 2 or words.ndim != 2 or words.dtype != torch.int32:
        raise UserError(f"{name}{PACKED} and {name}{SHAPE} do not belong together: {AGAIN}")
    n, k = shape.tolist()
    bits = next(
        (bits for bits in (4, 8) if words.shape == (n, k * bits // 32) and k * bits % 32 == 0), None
    )
    if bits is None:
        raise UserError(
            f"{name}{PACKED} {list(words.shape)} is no matrix of {n} x {k} in 4 or 8 bits: {AGAIN}"
        )
    return unpack_codes(words, bits)


def _checked(name: str, codes: Tensor | None, scales: Tensor) -> QuantizedWeight:
    if codes is None or codes.dtype not in SMALL or codes.ndim != 2:
        kind = "missing" if codes is None else f"{codes.dtype} {list(codes.shape)}"
        raise UserError(
            f"{name}{WEIGHT} is {kind}, and {name}{SCALE} says that it is a matrix in 8 bits: {AGAIN}"
        )
    n, k = codes.shape
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1)
    if scales.ndim != 2 or len(scales) != n or not scales.shape[1] or k % scales.shape[1]:
        raise UserError(
            f"{name}{SCALE} {list(scales.shape)} does not fit a matrix of {n} x {k}: {AGAIN}"
        )
    if not scales.is_floating_point() or not (scales.isfinite() & (scales > 0)).all():
        raise UserError(f"{name}{SCALE} holds numbers that are not above 0: {AGAIN}")
    return QuantizedWeight(codes, scales)

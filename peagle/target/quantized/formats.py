"""Weight formats, and their description in config.json in the terms of compressed-tensors.

| | weights | one scale per | inputs, if the server multiplies in 8 bits |
|---|---|---|---|
| fp8 | e4m3, 8 bits | output | e4m3, one scale per token |
| int8 | -127..127 | output | int8, one scale per token |
| int4 | -8..7, eight in an int32 | group of 128, 64 or 32 inputs of an output | not rounded |

The group size of int4 is the largest that divides the inputs of every matrix.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peagle.errors import UserError, did_you_mean

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str
    layout: str  # name in compressed-tensors
    bits: int
    low: float
    high: float
    full_scale: float  # with scale = largest magnitude / full_scale, no weight is clipped
    codes: torch.dtype
    scales: torch.dtype
    grouped: bool = False

    @property
    def searches_clip(self) -> bool:
        """Whether clipping outliers may reduce the error; in floating point it does not."""
        return not self.codes.is_floating_point

    def choose_group_size(self, widths: Iterable[int], group: int | None = None) -> int | None:
        """The number of inputs that share a scale, for matrices with these numbers of inputs.

        `group` asks for a size. None: all inputs of an output share a scale.
        """
        if group is not None and not (self.grouped and group in GROUP_SIZES):
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise UserError(
                f"{self.name} does not support a `group` of {group}: int4 supports {sizes},"
                " other formats none"
            )
        if not self.grouped:
            return None
        widths = sorted(set(widths))
        candidates = GROUP_SIZES if group is None else (group,)
        for size in candidates:
            if all(width % size == 0 for width in widths):
                return size
        raise UserError(
            f"{self.name} needs a multiple of {candidates[-1]} inputs, but matrices have {widths}:"
            " use int8"
        )


WEIGHT_FORMATS = {
    format.name: format
    for format in (
        WeightFormat(
            "fp8", "float-quantized", 8, -448, 448, 448, torch.float8_e4m3fn, torch.float32
        ),
        WeightFormat("int8", "int-quantized", 8, -127, 127, 127, torch.int8, torch.float32),
        WeightFormat(
            "int4", "pack-quantized", 4, -8, 7, 7, torch.int8, torch.bfloat16, grouped=True
        ),
    )
}


def find_format(name: str) -> WeightFormat:
    if name not in WEIGHT_FORMATS:
        names = [*WEIGHT_FORMATS, "mxfp4"]  # mxfp4 is written elsewhere (experts/mxfp4_write.py)
        raise UserError(
            f"unknown format {name!r}: use one of {', '.join(names)}.{did_you_mean(name, names)}"
        )
    return WEIGHT_FORMATS[name]


def quantization_config(
    format: WeightFormat, group: int | None, ignored: list[str]
) -> dict[str, Any]:
    """`quantization_config` of config.json. `ignored` are linear layers that are not quantized."""
    number_type = "float" if format.codes.is_floating_point else "int"
    strategy = "channel" if group is None else "group"
    weights = _quantization_args(format.bits, number_type, strategy, False, group)
    inputs = None
    if not format.grouped:
        inputs = _quantization_args(format.bits, number_type, "token", True, None)
    return {
        "quant_method": "compressed-tensors",
        "format": format.layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": format.layout,
            }
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _quantization_args(
    bits: int, number_type: str, strategy: str, dynamic: bool, group: int | None
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": number_type,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": group,
        "block_structure": None,
        "actorder": None,
        "observer": None if dynamic else "mse",
        "observer_kwargs": {},
    }

"""The formats: what a weight becomes, and how config.json tells it in the words of compressed-tensors.

| | weights | a scale for | inputs, where the server multiplies in 8 bits |
|---|---|---|---|
| fp8 | e4m3, 8 bits | an output | e4m3, a scale for a token |
| int8 | -127..127 | an output | int8, a scale for a token |
| int4 | -8..7, eight in an int32 | 128 inputs of an output (64 or 32, where 128 do not divide them) | as they are |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peagle.errors import UserError, nearest

GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str
    layout: str  # compressed-tensors' name of it
    bits: int
    low: float
    high: float
    whole: float  # a scale of the largest magnitude / whole cuts nothing off
    codes: torch.dtype
    scales: torch.dtype
    grouped: bool = False

    @property
    def searched(self) -> bool:
        """Is it worth while to cut outliers off?"""
        return not self.codes.is_floating_point

    def group_of(self, inputs: Iterable[int], wanted: int | None = None) -> int | None:
        """The inputs that share a scale, for matrices with so many; None: all of them."""
        if wanted is not None and not (self.grouped and wanted in GROUPS):
            raise UserError(
                f"a group of {wanted} cannot be had in {self.name}: int4 has {', '.join(map(str, GROUPS))}"
            )
        if not self.grouped:
            return None
        widths, sizes = sorted(set(inputs)), GROUPS if wanted is None else (wanted,)
        for group in sizes:
            if all(width % group == 0 for width in widths):
                return group
        raise UserError(
            f"{self.name} needs a multiple of {sizes[-1]} inputs, and matrices have {widths}: use int8"
        )


WEIGHT_FORMATS = {
    found.name: found
    for found in (
        WeightFormat("fp8", "float-quantized", 8, -448, 448, 448, torch.float8_e4m3fn, torch.float32),
        WeightFormat("int8", "int-quantized", 8, -127, 127, 127, torch.int8, torch.float32),
        WeightFormat("int4", "pack-quantized", 4, -8, 7, 7, torch.int8, torch.bfloat16, grouped=True),
    )
}


def find_format(name: str) -> WeightFormat:
    if name not in WEIGHT_FORMATS:
        raise UserError(
            f"unknown format {name!r}: use one of {', '.join(WEIGHT_FORMATS)}.{nearest(name, list(WEIGHT_FORMATS))}"
        )
    return WEIGHT_FORMATS[name]


def quantization_config(to: WeightFormat, group: int | None, ignored: list[str]) -> dict[str, Any]:
    """For config.json. `ignored`: linear layers that stay as they are."""
    kind = "float" if to.codes.is_floating_point else "int"
    weights = _arguments(to.bits, kind, "channel" if group is None else "group", False, group)
    inputs = None if to.grouped else _arguments(to.bits, kind, "token", True, None)
    return {
        "quant_method": "compressed-tensors",
        "format": to.layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": to.layout,
            }
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(
    bits: int, kind: str, strategy: str, dynamic: bool, group: int | None
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": group,
        "block_structure": None,
        "actorder": None,
        "observer": None if dynamic else "mse",
        "observer_kwargs": {},
    }

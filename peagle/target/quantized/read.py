"""A target's tensors from a quantized folder: multiplied out, and the codes that a kernel can read as they are."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import UserError
from peagle.target.quantized.codes import QuantizedWeight, concatenate_weights
from peagle.target.quantized.layout import AGAIN, PACKED, WEIGHT, parse_quantized
from peagle.target.quantized.shards import read_shard, shards

METHOD = "compressed-tensors"
LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def read_quantization(folder: Path) -> dict[str, Any] | None:
    """What config.json says of compressed-tensors; None for any other target, also one that is quantized otherwise."""
    try:
        found = json.loads((folder / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None  # whoever loads it tells what is wrong
    return found if isinstance(found, dict) and found.get("quant_method") == METHOD else None


def format_name(quantization: dict[str, Any]) -> str:
    """fp8, int8, int4; `mixed` where groups of layers differ."""
    groups = quantization["config_groups"].values()
    layouts = {group.get("format") or quantization.get("format") for group in groups}
    if unknown := sorted(map(str, layouts - set(LAYOUTS))):
        raise UserError(
            f"the target is stored as {unknown[0]}, and we read {', '.join(LAYOUTS)}: {AGAIN}"
        )
    kinds = {f"{group['weights']['type']}{group['weights']['num_bits']}" for group in groups}
    return kinds.pop().replace("float", "fp") if len(kinds) == 1 else "mixed"


def read_quantized(folder: Path, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight]]:
    """Every tensor in `dtype`, and by module the codes in 8 bits with a scale a row (words: no, their inputs stay)."""
    stored = {name: tensor for file in shards(folder) for name, tensor in read_shard(file).items()}
    codes, tensors = parse_quantized(stored)
    tensors |= {name + WEIGHT: found.matrix(dtype) for name, found in codes.items()}
    return tensors, {
        name: found for name, found in codes.items() if found.by_row and name + PACKED not in stored
    }


def attach_quantized(model: nn.Module, codes: dict[str, QuantizedWeight], device: str) -> None:
    """To the layers they belong to, where kernels of that device could read them: `joined_codes` finds them there."""
    for name, found in codes.items():
        if not device.startswith("cpu") or found.codes.dtype == torch.int8:
            layer: Any = model.get_submodule(name)
            layer.codes = found


def merge_quantized(layers: list[Any]) -> QuantizedWeight | None:
    """Of linear layers with the same inputs, as one and on their device; kept for the next engine."""
    first = layers[0]
    if hasattr(first, "joined"):
        return first.joined
    found = concatenate_weights([getattr(layer, "codes", None) for layer in layers])
    if found is not None:
        first.joined = found = found.to(first.weight.device)
        for layer in layers:
            del layer.codes
    return found

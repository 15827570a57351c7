"""Read a quantized target: dequantized tensors for the model, and 8-bit weights for kernels."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import UserError
from peagle.target.experts.stored_experts import StoredExperts
from peagle.target.quantized.codes import QuantizedWeight, concatenate_weights
from peagle.target.quantized.expert_layer import ExpertLayer
from peagle.target.quantized.layout import PACKED, QUANTIZE_AGAIN, WEIGHT, parse_quantized
from peagle.target.quantized.merged_experts import (
    can_stay_stored,
    dense_experts,
    stored_experts,
    take_parts,
)
from peagle.target.quantized.shards import read_shard, shard_paths

QUANT_METHOD = "compressed-tensors"
LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def read_quantization(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a target in compressed-tensors; None for any other target.

    A config.json that cannot be read gives None, too: loading the target reports the error.
    """
    try:
        content = json.loads((folder / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(content, dict) and content.get("quant_method") == QUANT_METHOD:
        return content
    return None


def format_name(quantization: dict[str, Any]) -> str:
    """fp8, int8 or int4; "mixed" if groups of layers differ. Raises for unsupported layouts."""
    groups = quantization["config_groups"].values()
    layouts = {group.get("format") or quantization.get("format") for group in groups}
    if unsupported := sorted(map(str, layouts - set(LAYOUTS))):
        raise UserError(
            f"the target is stored as {unsupported[0]}, but only {', '.join(LAYOUTS)} are"
            f" supported: {QUANTIZE_AGAIN}"
        )
    types = {f"{group['weights']['type']}{group['weights']['num_bits']}" for group in groups}
    return types.pop().replace("float", "fp") if len(types) == 1 else "mixed"


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The content of a quantized target."""

    tensors: dict[str, Tensor]  # by name: unquantized ones and dequantized ones
    weights: dict[str, QuantizedWeight]  # by linear layer: those that kernels can read
    experts: dict[str, StoredExperts]  # by module: 8-bit experts


def read_quantized(folder: Path, dtype: torch.dtype, layers: list[ExpertLayer]) -> StoredTensors:
    """Read all files; `layers` are those with experts.

    Kernels read 8-bit weights with one scale per row. They do not read packed weights, whose inputs
    are not rounded. These are dequantized to `dtype`, and so are all weights of linear layers.
    """
    stored: dict[str, Tensor] = {}
    for path in shard_paths(folder):
        stored |= read_shard(path)
    packed = {name.removesuffix(PACKED) for name in stored if name.endswith(PACKED)}
    weights, tensors = parse_quantized(stored)
    experts: dict[str, StoredExperts] = {}
    for layer in layers:
        is_packed = not packed.isdisjoint(layer.matrices)
        parts = take_parts(layer, weights)
        if parts is None:
            continue
        if not is_packed and all(map(can_stay_stored, parts)):
            experts[layer.module] = stored_experts(*parts)
        else:
            tensors |= dense_experts(layer, *parts, dtype)
    tensors |= {name + WEIGHT: weight.matrix(dtype) for name, weight in weights.items()}
    readable = {
        name: weight for name, weight in weights.items() if weight.by_row and name not in packed
    }
    return StoredTensors(tensors, readable, experts)


def attach_quantized(model: nn.Module, weights: dict[str, QuantizedWeight], device: str) -> None:
    """Attach each weight to its layer for `merge_quantized`, if kernels of the device read it."""
    for name, weight in weights.items():
        if not device.startswith("cpu") or weight.codes.dtype == torch.int8:
            layer: Any = model.get_submodule(name)
            layer.quantized_weight = weight


def merge_quantized(layers: list[Any]) -> QuantizedWeight | None:
    """The weights of linear layers with the same inputs as one, on their device.

    None if they are not quantized. The first layer keeps the result for the next engine.
    """
    first = layers[0]
    if hasattr(first, "merged_weight"):
        return first.merged_weight
    merged = concatenate_weights([getattr(layer, "quantized_weight", None) for layer in layers])
    if merged is not None:
        first.merged_weight = merged = merged.to(first.weight.device)
        for layer in layers:
            del layer.quantized_weight
    return merged

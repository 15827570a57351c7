"""ExpertLoad: the experts that a pass touched, and the bytes that it had to read for its layers."""

from dataclasses import dataclass
from typing import Any

from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.weight import Weight
from peagle.kernels.expert_matrices import ExpertMatrices
from peagle.kernels.stored_matrix import table_bytes


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    touched: float  # experts that computed a row, mean over the mixture layers
    experts: int  # of a layer
    layer_bytes: int  # attention, routers, touched experts and dense MLPs of all layers


def last_expert_load(target: FusedLlamaTarget) -> ExpertLoad | None:
    """The load of the target's last pass; None if its layers have no experts."""
    if target.expert_counts is None:
        return None
    touched = target.expert_counts[:, -1].tolist()
    layers: list[Any] = target.layers
    layer_bytes = sum(matrix_bytes(layer.qkv) + matrix_bytes(layer.out) for layer in layers)
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp.gate_up, ExpertMatrices)]
    dense = [layer.mlp for layer in layers if isinstance(layer.mlp.gate_up, Weight)]
    for mlp, count in zip(mixtures, touched, strict=True):
        layer_bytes += matrix_bytes(mlp.packed_router) + count * mlp.expert_bytes
    layer_bytes += sum(matrix_bytes(mlp.gate_up) + matrix_bytes(mlp.down) for mlp in dense)
    experts = target.expert_counts.shape[1] - 1
    return ExpertLoad(sum(touched) / len(touched), experts, layer_bytes)


def matrix_bytes(weight: Weight) -> int:
    """The bytes that a product of few rows reads."""
    if weight.matrix is not None:
        return weight.matrix.nbytes
    if weight.skinny_weight is not None:
        return table_bytes(weight.skinny_weight)
    return sum(table_bytes(part) for part in weight.parts)

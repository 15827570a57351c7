"""The experts of a layer, merged from the quantized matrices of a file.

8-bit matrices with one scale per output stay as stored, in StoredExperts. Others are dequantized
to the two tensors of transformers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation
from peagle.target.experts.stored_experts import StoredExperts
from peagle.target.quantized.codes import QuantizedWeight
from peagle.target.quantized.expert_layer import ExpertLayer
from peagle.target.quantized.layout import WEIGHT

# The matrices of each expert with the same inputs: gate and up, or down alone.
Parts = list[list[QuantizedWeight]]


def take_parts(
    layer: ExpertLayer, weights: dict[str, QuantizedWeight]
) -> tuple[Parts, Parts] | None:
    """Remove the layer's matrices from `weights`: those of gate and up, and those of down.

    None if the file has the experts of this layer unquantized.
    """
    missing = layer.matrices.keys() - weights.keys()
    if len(missing) == len(layer.matrices):
        return None
    if missing:
        raise UserError(
            f"the target lacks the quantized {min(missing)}{WEIGHT}, but has other experts of the"
            " layer: download or copy it again"
        )
    experts = range(layer.num_experts)
    gate_up = [[weights.pop(name) for name in layer.gate_and_up(expert)] for expert in experts]
    down = [[weights.pop(layer.down(expert))] for expert in experts]
    d, i = layer.hidden_size, layer.intermediate_size
    require_shape(layer, (part for parts in gate_up for part in parts), (i, d))
    require_shape(layer, (part for parts in down for part in parts), (d, i))
    return gate_up, down


def require_shape(
    layer: ExpertLayer, weights: Iterable[QuantizedWeight], shape: tuple[int, int]
) -> None:
    for weight in weights:
        if weight.codes.shape != shape:
            raise UserError(
                f"{layer.block_in_files}.experts has a matrix {list(weight.codes.shape)}, but the"
                f" config needs {list(shape)}: download or copy the target again"
            )


def can_stay_stored(parts: Parts) -> bool:
    """Whether all matrices have one scale per output and codes of one dtype."""
    weights = [weight for expert in parts for weight in expert]
    return all(x.by_row for x in weights) and len({x.codes.dtype for x in weights}) == 1


def stored_experts(gate_up: Parts, down: Parts) -> StoredExperts:
    return StoredExperts(stack_codes(gate_up), stack_codes(down), GatedActivation())


def stack_codes(parts: Parts) -> ExpertMatrices:
    """One expert after another: a second copy exists of one expert only."""
    first = torch.cat([weight.codes for weight in parts[0]])
    codes = first.new_empty(len(parts), *first.shape)
    scales = torch.empty(codes.shape[:2])
    for expert, weights in enumerate(parts):
        torch.cat([weight.codes for weight in weights], out=codes[expert])
        scales[expert] = torch.cat([weight.scales[:, 0] for weight in weights])
    return ExpertMatrices(codes, scales)


def dense_experts(
    layer: ExpertLayer, gate_up: Parts, down: Parts, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of transformers, dequantized."""
    return {
        f"{layer.module}.gate_up_proj": stack_dense(gate_up, dtype),
        f"{layer.module}.down_proj": stack_dense(down, dtype),
    }


def stack_dense(parts: Parts, dtype: torch.dtype) -> Tensor:
    outputs = sum(len(weight.codes) for weight in parts[0])
    merged = torch.empty(len(parts), outputs, parts[0][0].codes.shape[1], dtype=dtype)
    for expert, weights in enumerate(parts):
        torch.cat([weight.matrix(dtype) for weight in weights], out=merged[expert])
    return merged

"""Merge the weights of several linear layers into one, so that one product replaces several."""

from typing import Any

import torch
from torch import Tensor

from peagle.engine.model.weight import Weight
from peagle.target.gguf.modules import StoredLinear
from peagle.target.quantized.read import merge_quantized


def merged_weight(linears: list[Any], dtype: torch.dtype) -> Weight:
    """The weight of linear layers with the same inputs, for rows of this dtype.

    The outputs lie side by side.
    """
    if any(isinstance(linear, StoredLinear) for linear in linears):
        parts = [linear.weight for linear in linears]
        return Weight(parts, merged_bias(linears, dtype), dtype=dtype)
    return Weight(*merge_linears(linears), merge_quantized(linears), dtype)


def merged_bias(linears: list[Any], dtype: torch.dtype) -> Tensor | None:
    """The biases side by side, zeros for layers without one; None if no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    # Kept at the first layer: engines share a packed matrix only if its bias is the same tensor.
    kept = vars(linears[0]).setdefault("merged_biases", {})
    if dtype not in kept:
        kept[dtype] = concatenate_biases(linears, dtype)
    return kept[dtype]


def concatenate_biases(linears: list[Any], dtype: torch.dtype) -> Tensor:
    outputs = [len(linear.weight) for linear in linears]
    biases = [linear.bias for linear in linears]
    return torch.cat(
        [
            torch.zeros(n, dtype=dtype) if bias is None else bias.detach().to(dtype)
            for n, bias in zip(outputs, biases, strict=True)
        ]
    )


def merge_linears(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """The concatenated weights and biases.

    The layers keep views of them, so that memory holds every weight once. Layers that an earlier
    engine has merged are not copied again.
    """
    if are_merged(linears):
        return whole_storage(linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    start = 0
    for linear in linears:
        end = start + len(linear.weight)
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


def whole_storage(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """The weight and bias that merged layers are views of."""
    first = linears[0]
    outputs = sum(len(linear.weight) for linear in linears)
    bias = None if first.bias is None else first.bias.data.as_strided((outputs,), (1,))
    shape = (outputs, first.weight.shape[1])
    return first.weight.data.as_strided(shape, first.weight.stride()), bias


def are_merged(linears: list[Any]) -> bool:
    """Whether the weights lie one behind the other in one storage."""
    first = linears[0].weight
    storage = first.untyped_storage().data_ptr()
    end = first.data_ptr()
    for linear in linears:
        weight = linear.weight
        if weight.data_ptr() != end or weight.untyped_storage().data_ptr() != storage:
            return False
        end += weight.numel() * weight.element_size()
    return True

"""A weight in the layout of PyTorch's matrix library (oneDNN), for rows of bf16 on a CPU.

It is used where there are no C kernels: a plain weight is reordered in every product.
"""

import torch
from torch import Tensor

REORDER_ROWS = 8  # rows for which the matrix library chooses its layout


def can_reorder(weight: Tensor) -> bool:
    """Whether the matrix library has a layout of its own for this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, REORDER_ROWS)


def multiply_reordered(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, inputs] -> [T, outputs]"""
    return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")

"""A matrix as the engine multiplies with it: on a CPU in half precision, laid out once as the multiplication reads it.

PyTorch's own linear layer gives its matrix library plain rows every time; for the few rows of a step that costs as much
as the multiplication itself. Our own kernel (kernels/c/linear.c) reads the matrix once, at the speed of memory; where
there is none the library's layout is used. The laid-out copy is a second one: the model's own modules keep theirs.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels import cpu

ROWS = 8  # the library's layout is the best for about so many rows


class Weight:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.plain, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.panels = cpu.packed(self.plain)
        reorder = self.panels is None and packable(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, ROWS) if reorder else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]"""
        if self.panels is not None:
            return cpu.linear(x, self.panels, self.bias, len(self.plain))
        if self.packed is None:
            return linear(x, self.plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )

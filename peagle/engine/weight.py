"""A matrix as the engine multiplies with it: on a CPU in half precision, laid out once as the multiplication reads it.

PyTorch's own linear layer gives its matrix library plain rows every time; for the few rows of a step that costs as much
as the multiplication itself. Our own kernel (kernels/matrix.py) reads the matrix once, at the speed of memory; where it
cannot be had, the library's layout is used. The laid-out copy is a second one: the model's own modules keep theirs.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.few_rows import few_rows, fits, gated
from peagle.kernels.matrix import Matrix, possible
from peagle.kernels.swiglu import swiglu

ROWS = 8  # the library's layout is the best for about so many rows


class Weight:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.plain, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.matrix = Matrix(self.plain, self.bias) if possible(self.plain) else None
        reorder = self.matrix is None and packable(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, ROWS) if reorder else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]"""
        if self.matrix is not None:
            return self.matrix(x)
        if self.packed is None:
            return linear(x, self.plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def shares(self, x: Tensor) -> Tensor:
        """The same, or shares [S, T, outputs] that must be added up: for add_norm and rope_store, which do that."""
        return few_rows(x, self.plain, self.bias) if fits(x, self.plain) else self(x)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, of a gate and an up projection side by side: [T, outputs / 2]"""
        return gated(x, self.plain) if fits(x, self.plain, 2) else swiglu(self(x))

    def quantise(self) -> None:
        """From now on in int8, where `possible`."""
        assert self.matrix is not None
        self.matrix = Matrix(self.plain, self.bias, int8=True)


def packable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )

"""A matrix as the engine multiplies with it: on a CPU in half precision, laid out once as the multiplication reads it.

PyTorch's own linear layer gives its matrix library plain rows every time; for the few rows of a step that costs as much
as the multiplication itself. Our own kernel (kernels/matrix.py) reads the matrix once, at the speed of memory; where it
cannot be had, the library's layout is used. The laid-out copy is a second one: the model's own modules keep theirs.

Of a quantized target the codes come along. They take the weight's place (`shrink`) where a kernel reads them: int8 on a
CPU that has dot products of it, int8 and fp8 on a GPU for the few rows of a step and large matrices. Elsewhere the
weight is what they stand for.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.cpu.matrix import PackedMatrix, can_pack, quantize_int8
from peagle.kernels.triton.skinny_gemm import (
    gated_skinny_gemm,
    skinny_gemm,
    supports_skinny_gemm,
    supports_weight_dtype,
)
from peagle.kernels.triton.swiglu import swiglu
from peagle.target.quantized.codes import Codes

ROWS = 8  # the library's layout is the best for about so many rows
PAYS = 32 << 20  # weights from which on reading codes is faster on an H200 (docs/quantized.md)


class Weight:
    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, codes: Codes | None = None
    ) -> None:
        self.plain, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.codes, self.scales = codes, None  # type: Codes | None, Tensor | None
        self.read = self.plain  # what the kernel of few rows reads
        self.matrix = PackedMatrix(self.plain, self.bias) if can_pack(self.plain) else None
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
        return (
            skinny_gemm(x, self.read, self.bias, self.scales)
            if supports_skinny_gemm(x, self.read)
            else self(x)
        )

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, of a gate and an up projection side by side: [T, outputs / 2]"""
        return (
            gated_skinny_gemm(x, self.read, self.scales)
            if supports_skinny_gemm(x, self.read, gated=True)
            else swiglu(self(x))
        )

    def quantize(self) -> None:
        """From now on in int8, where `possible`."""
        assert self.matrix is not None
        codes, scales = quantize_int8(self.plain)
        self.matrix = PackedMatrix(codes, self.bias, scales)

    def shrink(self) -> bool:
        """From now on by its codes. False: there are none, or no kernel reads them here."""
        if self.codes is None or not self.codes.by_row:
            return False
        codes, scales = self.codes.codes, self.codes.scales[:, 0].float()
        if self.matrix is not None and codes.dtype == torch.int8:
            self.matrix = PackedMatrix(codes, self.bias, scales)
            return True
        here = self.plain.device
        large = here.type != "cuda" or self.plain.numel() >= PAYS
        if (
            large
            and supports_skinny_gemm(self.plain[:1], self.plain)
            and supports_weight_dtype(codes.dtype, here)
        ):  # any row: here one of its own
            self.read, self.scales = codes.to(here), scales.to(here)
            return True
        return False


def packable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )

"""A matrix product for rows of bf16 on a CPU, in C: the weight is packed once, in bf16 or int8.

    int8: W[n] is about scale[n] * q[n], where q holds whole numbers of -127..127. The input x is
    quantized in the same way, with one scale for 64 inputs of a row.

The CPU must have dot products of both types (avx512_bf16, avx512_vnni). The bits of a row do not
depend on its neighbors.
"""

import ctypes

import torch
from torch import Tensor

from peagle.kernels.cpu.library import library
from peagle.kernels.stored_matrix import StoredMatrix

INPUT_GROUP = 64  # inputs that share a scale, as in c/matrix.c
INT8_MAX = 127


class MatrixStruct(ctypes.Structure):
    """`struct matrix` in c/matrix.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_long),
        ("k", ctypes.c_long),
    ]


class PackedMatrix:
    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> None:
        """weight [N, K] in bf16 (see `can_pack`), or int8 with scales [N] float32; bias [N]."""
        assert weight.dtype == (torch.bfloat16 if scales is None else torch.int8)
        self.n, self.k = weight.shape
        # The struct points to these tensors.
        self.bias = None if bias is None else bias.contiguous()
        self.scales = None if scales is None else scales.contiguous()
        self.packed = pack_weight(weight)
        pointers = (
            None if x is None else x.data_ptr() for x in (self.packed, self.scales, self.bias)
        )
        self.struct = MatrixStruct(*pointers, self.n, self.k)
        self.address = ctypes.addressof(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        assert x.dtype == torch.bfloat16 and x.shape[1] == self.k
        if x.stride(1) != 1 or x.stride(0) % 2:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.n, dtype=x.dtype)
        lib = library()
        assert lib is not None
        lib.multiply(
            self.address,
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.stride(0),
            torch.get_num_threads(),
        )
        return out


def can_pack(weight: Tensor | StoredMatrix) -> bool:
    """Whether `PackedMatrix` supports this weight on this machine."""
    if isinstance(weight, StoredMatrix):
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return False
    lib = library()
    return lib is not None and lib.has_packed_matrices


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 [N, K] and scales [N] float32: a row has the maximum 127."""
    wide = weight.float()
    scales = (wide.abs().amax(1) / INT8_MAX).clamp(min=1e-12)
    return (wide / scales[:, None]).round().to(torch.int8), scales


def pack_weight(weight: Tensor) -> Tensor:
    """Lay out a weight [N, K] as c/matrix.c reads it."""
    lib = library()
    assert lib is not None
    weight = weight.contiguous()
    n, k = weight.shape
    int8_words = -(-k // INPUT_GROUP) * INPUT_GROUP // 4  # of 32 bits
    words = k // 2 if weight.dtype == torch.bfloat16 else int8_words
    panels = -(-n // lib.panel_width)
    packed = torch.empty(panels * lib.panel_width * words, dtype=torch.int32)
    lib.pack(weight.data_ptr(), packed.data_ptr(), n, k, weight.element_size(), words)
    return packed

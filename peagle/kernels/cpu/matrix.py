"""A matrix that multiplies rows of bf16 on a CPU, in C: laid out once, in bf16 or in int8 with a scale per output.

    int8: W[n] is about scale[n] * q[n], q whole numbers of -127..127; so is x, with a scale for 64 inputs of a row.

Only where the CPU has dot products of both (avx512_bf16, avx512_vnni). A row's bits do not depend on its neighbors.
"""

import ctypes

import torch
from torch import Tensor

from peagle.kernels.cpu.library import library

GROUP = 64  # inputs that share a step, as in c/matrix.c


class Struct(ctypes.Structure):
    """`struct matrix` in c/matrix.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_long),
        ("k", ctypes.c_long),
    ]


class Matrix:
    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> None:
        """weight [N, K] (see `possible`), or int8 with scales [N] float32; bias [N]."""
        assert weight.dtype == (torch.bfloat16 if scales is None else torch.int8)
        self.n, self.k = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.scales = None if scales is None else scales.contiguous()
        self.packed = pack_matrix(weight)
        held = (None if x is None else x.data_ptr() for x in (self.packed, self.scales, self.bias))
        self.struct = Struct(*held, self.n, self.k)
        self.at = ctypes.addressof(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        assert x.dtype == torch.bfloat16 and x.shape[1] == self.k
        if x.stride(1) != 1 or x.stride(0) % 2:
            x = x.contiguous()
        out, lib = torch.empty(x.shape[0], self.n, dtype=x.dtype), library()
        assert lib is not None
        lib.multiply(
            self.at, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), torch.get_num_threads()
        )
        return out


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return False
    lib = library()
    return lib is not None and lib.multiplies


def quantized_matrix(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 [N, K] and scales [N] float32: the largest of an output becomes 127."""
    wide = weight.float()
    scales = (wide.abs().amax(1) / 127).clamp(min=1e-12)
    return (wide / scales[:, None]).round().to(torch.int8), scales


def pack_matrix(weight: Tensor) -> Tensor:
    """[N, K] as c/matrix.c reads it."""
    lib, weight, (n, k) = library(), weight.contiguous(), weight.shape
    assert lib is not None
    words = k // 2 if weight.dtype == torch.bfloat16 else -(-k // GROUP) * GROUP // 4
    out = torch.empty(-(-n // lib.panel) * lib.panel * words, dtype=torch.int32)
    lib.pack(weight.data_ptr(), out.data_ptr(), n, k, weight.element_size(), words)
    return out

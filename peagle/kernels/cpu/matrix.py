"""A matrix product on a CPU, in C, with a weight that is packed once.

The weight is in bf16, in int8 or fp8 with a scale per output, in MXFP4, or in the blocks of a GGUF
file. Rows are
float32 or bf16. With `int8_rows` they are quantized too, 32 inputs with one scale: faster, but the
product is no longer that of the weight. The bits of a row do not depend on its neighbors.
"""

import ctypes
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.cpu.library import DTYPE_SUFFIXES, FORMATS, Library, library
from peagle.kernels.cpu.threads import kernel_threads
from peagle.kernels.expert_matrices import MXFP4_BLOCK
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix

INT8_MAX = 127


@dataclass(frozen=True, eq=False)
class Int8Matrix:
    """W[n] is about scales[n] * codes[n]."""

    codes: Tensor  # [N, K] int8
    scales: Tensor  # [N] float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """W[n] is scales[n] * codes[n]. It is packed in bf16, which holds the codes exactly."""

    codes: Tensor  # [N, K] float8
    scales: Tensor  # [N] float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


@dataclass(frozen=True, eq=False)
class Mxfp4Matrix:
    """Codes of 4 bits, 32 of which share a scale; see peagle/kernels/expert_matrices.py."""

    codes: Tensor  # [N, K / 2] uint8
    scales: Tensor  # [N, K / 32] uint8

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), 2 * self.codes.shape[1]))


Packable = Tensor | Int8Matrix | Fp8Matrix | Mxfp4Matrix | StoredMatrix


class PartStruct(ctypes.Structure):
    """`struct part` in c/matrix.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("format", ctypes.c_long),
        ("n", ctypes.c_long),
    ]


class MatrixStruct(ctypes.Structure):
    """`struct matrix` in c/matrix.h."""

    _fields_ = [
        ("parts", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("part_count", ctypes.c_long),
        ("n", ctypes.c_long),
        ("k", ctypes.c_long),
        ("int8_rows", ctypes.c_long),
    ]


class PackedMatrix:
    def __init__(
        self,
        weight: Packable | Sequence[Packable],
        bias: Tensor | None = None,
        int8_rows: bool = False,
    ) -> None:
        """weight [N, K], or several whose outputs lie side by side; bias [N].

        A tensor must be exact in bf16 (see `can_pack`). Rows in int8 need codes, so `int8_rows`
        takes no tensor (see `quantize_int8`).
        """
        weights = [weight] if isinstance(weight, Packable) else list(weight)
        assert not (int8_rows and any(isinstance(part, Tensor) for part in weights))
        (self.k,) = {part.shape[1] for part in weights}
        self.n = sum(part.shape[0] for part in weights)
        assert bias is None or len(bias) == self.n
        # The structs point to these tensors.
        self.bias = None if bias is None else bias.float().contiguous()
        self.scales = [
            part.scales.float().contiguous() if isinstance(part, Int8Matrix | Fp8Matrix) else None
            for part in weights
        ]
        self.packed = [pack_weight(part) for part in weights]
        parts = [
            PartStruct(
                packed.data_ptr(),
                None if scales is None else scales.data_ptr(),
                FORMATS.index(format_of(part)),
                part.shape[0],
            )
            for part, packed, scales in zip(weights, self.packed, self.scales, strict=True)
        ]
        self.parts = (PartStruct * len(parts))(*parts)
        self._use_rows(int8_rows)

    def _use_rows(self, int8_rows: bool) -> None:
        self.int8_rows = int8_rows
        self.struct = MatrixStruct(
            ctypes.addressof(self.parts),
            None if self.bias is None else self.bias.data_ptr(),
            len(self.parts),
            self.n,
            self.k,
            int8_rows,
        )
        self.address = ctypes.addressof(self.struct)

    def with_int8_rows(self) -> "PackedMatrix":
        """The same codes, multiplied with rows of int8; they are not packed again."""
        assert all(part.format != FORMATS.index("BF16") for part in self.parts)
        matrix = copy(self)
        matrix._use_rows(int8_rows=True)
        return matrix

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        assert x.shape[1] == self.k
        # Rows of bf16 are read in pairs.
        if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.n, dtype=x.dtype)
        loaded_library().functions["multiply", x.dtype](
            self.address,
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.stride(0),
            kernel_threads(),
        )
        return out

    @property
    def nbytes(self) -> int:
        return sum(packed.numel() for packed in self.packed)


def can_pack(weight: Packable, dtype: torch.dtype | None = None) -> bool:
    """Whether `PackedMatrix` supports this weight here, with rows of `dtype` (None: its own)."""
    if library() is None:
        return False
    if dtype is not None and dtype not in DTYPE_SUFFIXES:
        return False
    if isinstance(weight, StoredMatrix):
        return weight.blocks.device.type == "cpu" and weight.format in BLOCK_FORMATS
    if isinstance(weight, Int8Matrix | Mxfp4Matrix):
        return True
    if isinstance(weight, Fp8Matrix):
        return weight.shape[1] % 2 == 0
    if weight.device.type != "cpu" or (dtype or weight.dtype) not in DTYPE_SUFFIXES:
        return False
    return weight.shape[1] % 2 == 0 and is_exact_in_bf16(weight)


def is_exact_in_bf16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().to(weight.dtype), weight)


def quantize_int8(weight: Tensor) -> Int8Matrix:
    """Round a weight [N, K] to int8: each row has the maximum 127."""
    wide = weight.float()
    scales = (wide.abs().amax(1) / INT8_MAX).clamp(min=1e-12)
    return Int8Matrix((wide / scales[:, None]).round().to(torch.int8), scales)


def format_of(weight: Packable) -> str:
    if isinstance(weight, StoredMatrix):
        return weight.format
    if isinstance(weight, Mxfp4Matrix):
        return "MXFP4"
    return "INT8" if isinstance(weight, Int8Matrix) else "BF16"


def pack_weight(weight: Packable) -> Tensor:
    """Lay out a weight [N, K] as c/block_format.h describes."""
    lib = loaded_library()
    n, k = weight.shape
    source = packing_source(weight)
    number = FORMATS.index(format_of(weight))
    packed = torch.empty(lib.packed_size(number, n, k), dtype=torch.uint8)
    row_size = source.shape[1] * source.element_size()
    threads = kernel_threads()
    lib.pack(number, source.data_ptr(), packed.data_ptr(), n, k, row_size, threads)
    return packed


def packing_source(weight: Packable) -> Tensor:
    """What the C function reads: [N, numbers or bytes of a row]."""
    if isinstance(weight, StoredMatrix):
        return weight.blocks.contiguous()
    if isinstance(weight, Int8Matrix):
        return weight.codes.contiguous()
    if isinstance(weight, Fp8Matrix):
        return weight.codes.bfloat16().contiguous()
    if isinstance(weight, Mxfp4Matrix):  # each scale before its codes
        codes = weight.codes.unflatten(1, (-1, MXFP4_BLOCK // 2))
        return torch.cat([weight.scales[:, :, None], codes], 2).flatten(1)
    return weight.bfloat16().contiguous()


def loaded_library() -> Library:
    lib = library()
    assert lib is not None
    return lib

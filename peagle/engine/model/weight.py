"""Weight: a matrix in the layout in which the engine multiplies with it.

PyTorch's linear layer passes plain rows to its matrix library every time; for the few rows of a
step, reordering them takes as long as the product. On a CPU our own kernel (kernels/cpu/matrix.py)
reads a copy that is packed once, at the speed of memory. Where that kernel is not available, the
copy is in the matrix library's layout. The model's modules keep their own.
Engines on the same weights share the copies, so weights must not change while an engine uses them.

A weight of a GGUF file stays as it is stored where the kernel reads its blocks; elsewhere it is
widened once. The parts of a merged weight may have different formats.

A weight of a quantized target comes with its codes. `use_codes` replaces the weight by them where a
kernel reads them: int8 on a CPU with the C kernels, int8 and fp8 on a GPU for the few rows of a
step and large matrices. Elsewhere the dequantized weight is used.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.cpu.matrix import Int8Matrix, PackedMatrix, can_pack, quantize_int8
from peagle.kernels.cpu.reordered import can_reorder, multiply_reordered, reorder
from peagle.kernels.stored_matrix import StoredMatrix, Table, dense
from peagle.kernels.triton.batch_invariant.gemm import (
    gated_invariant_gemm,
    invariant_gemm,
    supports_invariant_gemm,
)
from peagle.kernels.triton.batch_invariant.split_k import add_splits
from peagle.kernels.triton.batch_invariant.vendor_gemm import VendorRows
from peagle.kernels.triton.skinny_gemm import (
    gated_skinny_gemm,
    skinny_gemm,
    supports_skinny_gemm,
    supports_weight_dtype,
)
from peagle.kernels.triton.swiglu import swiglu
from peagle.target.quantized.codes import QuantizedWeight

# Number of weights from which on reading codes is faster on an H200 (docs/quantized.md).
MIN_GPU_CODES = 32 << 20
Packed = TypeVar("Packed")


class PackedCopy(Generic[Packed]):
    """A copy of a weight in the layout of a kernel."""

    def __init__(self, source: tuple[object, ...], packed: Packed) -> None:
        self.source = source  # Kept alive: the addresses of its tensors identify the copy.
        self.packed = packed


# The copies that some engine uses, by their layout and the address of the weight.
_copies: "WeakValueDictionary[tuple[object, ...], PackedCopy[Any]]" = WeakValueDictionary()


def shared_copy(
    layout: str, source: Sequence[Tensor | None], pack: Callable[[], Packed]
) -> PackedCopy[Packed]:
    """The copy in this layout that another engine made of the same tensors, or a new one."""
    tensors = (None if x is None else (x.data_ptr(), x.shape, x.stride()) for x in source)
    key = (layout, *tensors)
    copy = _copies.get(key)
    if copy is None:
        copy = _copies.setdefault(key, PackedCopy(tuple(source), pack()))
    return copy


class Weight:
    def __init__(
        self,
        weight: Table | Sequence[Table],
        bias: Tensor | None = None,
        codes: QuantizedWeight | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weight [outputs, inputs], or several whose outputs lie side by side.

        `dtype`: of the rows that are multiplied; None: that of the weight.
        """
        parts = (weight,) if isinstance(weight, (Tensor, StoredMatrix)) else tuple(weight)
        self.parts = tuple(x.detach() if isinstance(x, Tensor) else x for x in parts)
        self.bias = None if bias is None else bias.detach()
        self.codes = codes
        self.matrix: PackedMatrix | None = None
        self.reordered: Tensor | None = None
        # Own the widened weight, and the packed matrix or the reordered weight.
        self._wide: PackedCopy[PackedMatrix | Tensor] | None = None
        self._copy: PackedCopy[PackedMatrix | Tensor] | None = None
        self._float_copy: PackedCopy[PackedMatrix | Tensor] | None = None
        if can_pack_parts(self.parts, dtype):
            self._use_matrix("packed", self._pack)
        self.weight = self._tensor(dtype)
        # What the kernel for few rows reads: the weight, or codes with one scale per output.
        self.skinny_weight = self.weight
        self.skinny_scales: Tensor | None = None
        self.batch_invariant = False  # see `use_batch_invariant`
        self.vendor_rows: VendorRows | None = None
        if self.matrix is None and self.weight is not None and can_reorder(self.weight):
            whole = self.weight
            self._copy = self._shared_copy("reordered", lambda: reorder(whole))
            assert isinstance(self._copy.packed, Tensor)
            self.reordered = self._copy.packed

    @property
    def is_stored(self) -> bool:
        """Whether parts are multiplied in the formats of a GGUF file."""
        return self.matrix is not None and any(isinstance(x, StoredMatrix) for x in self.parts)

    def _pack(self) -> PackedMatrix:
        return PackedMatrix(self.parts, self.bias)

    def _tensor(self, dtype: torch.dtype | None) -> Tensor | None:
        """The whole weight in the dtype of the rows; None if only the packed matrix has it."""
        if is_plain(self.parts, dtype):
            return self.parts[0]  # type: ignore[return-value]
        if self.matrix is not None:
            return None
        wide_dtype = dtype or torch.float32
        self._wide = self._shared_copy(
            f"wide {wide_dtype}", lambda: torch.cat([dense(x, wide_dtype) for x in self.parts])
        )
        assert isinstance(self._wide.packed, Tensor)
        return self._wide.packed

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]"""
        if self.matrix is not None:
            return self.matrix(x)
        if self.batch_invariant:
            return add_splits(self._invariant_product(x), x.dtype)
        if self.reordered is not None:
            return multiply_reordered(x, self.reordered, self.bias)
        assert self.weight is not None
        return linear(x, self.weight, self.bias)

    def split_k(self, x: Tensor) -> Tensor:
        """The product [T, outputs], or its split-K partial sums [S, T, outputs].

        add_norm, rope_store and rotated attention add the partial sums up.
        """
        if self.batch_invariant:
            return self._invariant_product(x)
        if self.skinny_weight is not None and supports_skinny_gemm(x, self.skinny_weight):
            return skinny_gemm(x, self.skinny_weight, self.bias, self.skinny_scales)
        return self(x)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, for gate and up projections side by side: [T, outputs / 2]"""
        weight = self.skinny_weight
        if self.batch_invariant:
            return self._invariant_product(x, gated=True)
        if weight is not None and supports_skinny_gemm(x, weight, gated=True):
            return gated_skinny_gemm(x, weight, self.skinny_scales)
        return swiglu(self(x))

    def quantize(self) -> None:
        """Multiply in int8 from now on. Requires the C kernels."""

        def pack() -> PackedMatrix:
            if self.matrix is not None and all(isinstance(x, StoredMatrix) for x in self.parts):
                self._float_copy = self._copy  # Another engine may use it.
                return self.matrix.with_int8_rows()
            parts = [x if isinstance(x, StoredMatrix) else quantize_int8(x) for x in self.parts]
            return PackedMatrix(parts, self.bias, int8_rows=True)

        self._use_matrix("int8", pack)

    def use_codes(self, min_gpu_weights: int = MIN_GPU_CODES) -> bool:
        """Multiply with the codes of the quantized checkpoint from now on.

        Returns False, and changes nothing, if there are none or no kernel reads them here.
        `min_gpu_weights`: on a GPU, smaller matrices stay as they are.
        """
        if self.codes is None or not self.codes.by_row:
            return False
        codes = self.codes.codes
        scales = self.codes.scales[:, 0].float()
        if self.matrix is not None and codes.dtype == torch.int8:
            matrix = Int8Matrix(codes, scales)
            self._use_matrix("codes", lambda: PackedMatrix(matrix, self.bias, int8_rows=True))
            return True
        assert self.weight is not None
        device = self.weight.device
        large = device.type != "cuda" or self.weight.numel() >= min_gpu_weights
        row = self.weight[:1]  # any row with the right number of inputs
        if (
            large
            and supports_skinny_gemm(row, self.weight)
            and supports_weight_dtype(codes.dtype, device)
        ):
            self.skinny_weight = codes.to(device)
            self.skinny_scales = scales.to(device)
            return True
        return False

    def _invariant_product(self, x: Tensor, gated: bool = False) -> Tensor:
        """[T, outputs], partial sums [S, T, outputs], or gated [T, outputs / 2]"""
        weight, scales = self.skinny_weight, self.skinny_scales
        assert weight is not None
        if self.vendor_rows is not None and self.bias is None and scales is None:
            result = self.vendor_rows.multiply(x, weight, gated)
            if result is not None:
                return result
        if gated:
            return gated_invariant_gemm(x, weight, scales)
        return invariant_gemm(x, weight, self.bias, scales)

    def use_batch_invariant(self, enabled: bool = True) -> bool:
        """Multiply so that the bits of a row do not depend on the number of rows, from now on.

        Returns False, and changes nothing, where no kernel does that. The C kernels always do.
        """
        if self.matrix is not None:
            return True
        weight = self.weight
        # Any row with the right number of inputs.
        if weight is None or not supports_invariant_gemm(weight[:1], weight):
            return False
        self.batch_invariant = enabled
        return True

    def _use_matrix(self, layout: str, pack: Callable[[], PackedMatrix]) -> None:
        self._copy = self._shared_copy(layout, pack)
        assert isinstance(self._copy.packed, PackedMatrix)
        self.matrix = self._copy.packed

    def _shared_copy(
        self, layout: str, pack: Callable[[], PackedMatrix | Tensor]
    ) -> PackedCopy[PackedMatrix | Tensor]:
        """The copy that another engine made of this weight, or a new one."""
        tensors = [x.blocks if isinstance(x, StoredMatrix) else x for x in self.parts]
        codes = None if self.codes is None else self.codes.codes
        return shared_copy(layout, [*tensors, self.bias, codes], pack)


def is_plain(parts: tuple[Table, ...], dtype: torch.dtype | None) -> bool:
    """Whether a weight is one tensor in the dtype of the rows."""
    first = parts[0]
    return len(parts) == 1 and isinstance(first, Tensor) and first.dtype == (dtype or first.dtype)


def can_pack_parts(parts: tuple[Table, ...], dtype: torch.dtype | None) -> bool:
    """Whether the kernel reads these parts as they are, for rows of this dtype."""
    return all(can_pack(part, dtype) for part in parts)

"""A whole Llama-like layer, or a stack of them, in one call, on a CPU (c/layer.c).

It runs the same kernels in the same order as peagle/engine/model/fused_llama.py does one by one,
and gives the same bits. It saves about fifteen PyTorch operations and calls from Python per layer.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.cpu.experts import PackedMoe
from peagle.kernels.cpu.matrix import MatrixStruct, PackedMatrix, loaded_library
from peagle.kernels.cpu.threads import kernel_threads
from peagle.kernels.row_pass import RowPass


def struct_fields(ctype: type, *names: str) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names]


class LayerStruct(ctypes.Structure):
    """`struct layer` in c/layer.c."""

    _fields_ = [
        *struct_fields(MatrixStruct, "qkv", "out", "gate_up", "down"),
        ("moe", ctypes.c_void_p),
        *struct_fields(ctypes.c_void_p, "input_norm", "mlp_norm", "q_norm", "k_norm", "sinks"),
        *struct_fields(ctypes.c_long, "heads", "kv_heads", "head_dim", "window"),
        *struct_fields(ctypes.c_float, "eps", "scale"),
    ]


class RowPassStruct(ctypes.Structure):
    """`struct row_pass` in c/layer.c."""

    _fields_ = [
        *struct_fields(ctypes.c_void_p, "positions", "kv_slots", "tree_masks", "page_tables"),
        *struct_fields(
            ctypes.c_void_p, "row_starts", "row_counts", "first_positions", "rope_table"
        ),
        *struct_fields(ctypes.c_long, "bidirectional_rows", "rows", "batch", "max_rows"),
        *struct_fields(ctypes.c_long, "page_size", "pages", "rot", "rope_length"),
        ("threads", ctypes.c_int),
    ]


@dataclass(slots=True)
class LayerWorkspace:
    """What the layers of one pass share: the rows in C, and scratch memory."""

    rows: RowPassStruct
    tensors: tuple[Tensor | None, ...]  # what `rows` points to
    scratch: Tensor

    @classmethod
    def create(
        cls, rows: RowPass, rope_table: Tensor, row_width: int, dtype: torch.dtype
    ) -> "LayerWorkspace":
        """rope_table [max_positions, rot]; row_width: `FusedLayer.scratch_width`."""
        requests = (rows.page_tables, rows.row_starts, rows.row_counts, rows.first_positions)
        tensors = (
            rows.positions.long().contiguous(),
            rows.kv_slots.long().contiguous(),
            None if rows.tree_masks is None else rows.tree_masks.contiguous(),
            *(x.int().contiguous() for x in requests),
            rope_table,
        )
        row_count = len(rows.kv_slots)
        struct = RowPassStruct(
            *(None if x is None else x.data_ptr() for x in tensors),
            rows.bidirectional_rows,
            row_count,
            len(rows.page_tables),
            rows.max_rows,
            rows.page_size,
            rows.page_tables.shape[1],
            rope_table.shape[1],
            len(rope_table),
            kernel_threads(),
        )
        return cls(struct, tensors, torch.empty(row_count * row_width, dtype=dtype))


class LayerMatrices(NamedTuple):
    """The matrices of attention, and those of the MLP or a mixture of experts."""

    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix | None = None
    down: PackedMatrix | None = None
    moe: PackedMoe | None = None  # in place of gate_up and down

    @property
    def scratch_width(self) -> int:
        """Numbers per row; a mixture of experts has its own memory."""
        attention = self.qkv.n + self.out.k + 2 * self.out.n
        if self.gate_up is None or self.down is None:
            return attention
        return attention + self.gate_up.n + self.down.k


class FusedLayer:
    """One layer; `ops.supports_heads` tells whether its heads are supported."""

    def __init__(
        self,
        matrices: LayerMatrices,
        input_norm: Tensor,
        mlp_norm: Tensor,
        heads: AttentionHeads,
        head_dim: int,
        params: AttentionParams,
    ) -> None:
        assert params.softcap is None
        assert (matrices.moe is None) == (matrices.gate_up is not None)
        assert (matrices.gate_up is None) == (matrices.down is None)
        # The struct points to these tensors.
        self.matrices = matrices
        norms = (input_norm, mlp_norm, heads.q_norm, heads.k_norm)
        self.norms = [None if x is None else x.contiguous() for x in norms]
        self.sinks = None if params.sinks is None else params.sinks.float().contiguous()
        self.struct = LayerStruct(
            matrices.qkv.struct,
            matrices.out.struct,
            *(MatrixStruct() if x is None else x.struct for x in (matrices.gate_up, matrices.down)),
            None if matrices.moe is None else matrices.moe.address,
            *(None if x is None else x.data_ptr() for x in self.norms),
            None if self.sinks is None else self.sinks.data_ptr(),
            heads.num_heads,
            heads.num_kv_heads,
            head_dim,
            params.window_size,
            heads.eps,
            params.scale,
        )
        self.address = ctypes.addressof(self.struct)
        self.input_size = matrices.qkv.k
        self.hidden_size = matrices.out.n
        self.scratch_width = matrices.scratch_width

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        workspace: LayerWorkspace,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """normed [T, input_size], residual [T, hidden_size] -> (MLP output, residual stream).

        The residual stream returned is the one to which the MLP output is still to be added.
        """
        rows = normed.shape[0]
        assert normed.is_contiguous() and normed.shape[1] == self.input_size
        assert residual.stride(1) == 1 and len(workspace.scratch) >= rows * self.scratch_width
        mlp_output, total = (
            torch.empty(rows, self.hidden_size, dtype=normed.dtype) for _ in range(2)
        )
        loaded_library().functions["layer", normed.dtype](
            self.address,
            ctypes.addressof(workspace.rows),
            normed.data_ptr(),
            residual.data_ptr(),
            residual.stride(0),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            workspace.scratch.data_ptr(),
            mlp_output.data_ptr(),
            total.data_ptr(),
        )
        return mlp_output, total


class TapsStruct(ctypes.Structure):
    """`struct taps` in c/layer.c."""

    _fields_ = [("layers", ctypes.c_void_p), ("count", ctypes.c_long)]


class StackOutput(NamedTuple):
    x: Tensor  # [T, d] the output of the last MLP
    residual: Tensor  # [T, d] the residual stream to which it is still to be added
    taps: Tensor  # [T, taps * d] the residual streams entering the tapped layers, side by side


class FusedLayers:
    """Consecutive layers, each behind its norm. One call saves the way back to Python."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self.layers = list(layers)  # The pointers below belong to them.
        self.addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        (self.hidden_size,) = {layer.hidden_size for layer in layers}
        widest = max(layer.scratch_width for layer in layers)
        self.scratch_width = widest + 2 * self.hidden_size  # numbers per row

    def __call__(
        self,
        x: Tensor,
        workspace: LayerWorkspace,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        tapped_layers: Sequence[int],
    ) -> StackOutput:
        """x [T, d]: the embeddings, which are overwritten; keys, values: of each layer."""
        rows, d = x.shape
        assert x.is_contiguous() and d == self.hidden_size
        assert len(workspace.scratch) >= rows * self.scratch_width
        residual = torch.empty_like(x)
        taps = torch.empty(rows, len(tapped_layers) * d, dtype=x.dtype)
        count = len(self.layers)
        pointers = [
            (ctypes.c_void_p * count)(*(cache.data_ptr() for cache in caches[:count]))
            for caches in (keys, values)
        ]
        tapped = torch.tensor(tapped_layers, dtype=torch.long)
        taps_struct = TapsStruct(tapped.data_ptr(), len(tapped_layers))
        loaded_library().functions["layers", x.dtype](
            ctypes.addressof(self.addresses),
            count,
            ctypes.addressof(workspace.rows),
            *(ctypes.addressof(array) for array in pointers),
            ctypes.addressof(taps_struct),
            workspace.scratch.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            taps.data_ptr(),
        )
        return StackOutput(x, residual, taps)

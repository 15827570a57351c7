"""A whole Llama-like layer in one call, on a CPU in bf16 (c/layer.c).

It is the same kernels in the same order as `engine/lean.py` has them one by one, and gives the same bits: what is saved
is some fifteen operations of PyTorch and as many calls from Python, for each of which a step would wait.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.cpu import matrix
from peagle.kernels.cpu.library import library
from peagle.kernels.cpu.ops import EVERYTHING, MAX_DIM, QUERIES

P, L = ctypes.c_void_p, ctypes.c_long


class Struct(ctypes.Structure):
    """`struct layer` in c/layer.c."""

    _fields_ = [
        *((name, matrix.Struct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, P) for name in ("after", "q_norm", "k_norm")),
        *((name, L) for name in ("heads", "kv_heads", "d", "window")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    ]


class Pass(ctypes.Structure):
    """`struct pass` in c/layer.c."""

    _fields_ = [
        *(
            (name, P)
            for name in (
                "positions",
                "slots",
                "masks",
                "tables",
                "starts",
                "counts",
                "first",
                "table",
            )
        ),
        *(
            (name, L)
            for name in ("both", "rows", "batch", "most", "page", "pages", "rot", "length")
        ),
        ("threads", ctypes.c_int),
    ]


@dataclass(slots=True)
class Work:
    """What the layers of one pass share: the rows, and room to work in."""

    rows: Pass
    held: tuple[Tensor | None, ...]  # what it points to
    scratch: Tensor

    @staticmethod
    def of(rows: Any, table: Tensor, width: int) -> "Work":
        """rows: a RowPass; table [positions, rot] of angles; width: numbers a row needs on its way."""
        held = (
            rows.positions.long().contiguous(),
            rows.slots.long().contiguous(),
            None if rows.masks is None else rows.masks.contiguous(),
            *(x.int().contiguous() for x in (rows.tables, rows.starts, rows.counts, rows.first)),
            table,
        )
        count = len(rows.slots)
        sizes = (
            count,
            len(rows.tables),
            rows.most,
            rows.page,
            rows.tables.shape[1],
            table.shape[1],
            len(table),
        )
        made = Pass(
            *(None if x is None else x.data_ptr() for x in held),
            rows.both,
            *sizes,
            torch.get_num_threads(),
        )
        return Work(made, held, torch.empty(count * width, dtype=torch.bfloat16))


class Whole:
    """One layer."""

    def __init__(
        self,
        matrices: list[matrix.Matrix],
        norms: list[Tensor | None],
        heads: int,
        kv_heads: int,
        d: int,
        eps: float,
        window: int | None,
    ) -> None:
        """matrices: qkv, out, gate_up, down; norms: before the MLP, of query heads, of key heads."""
        self.matrices, self.norms = matrices, [None if x is None else x.contiguous() for x in norms]
        self.struct = Struct(
            *(m.struct for m in matrices),
            *(None if x is None else x.data_ptr() for x in self.norms),
            heads,
            kv_heads,
            d,
            EVERYTHING if window is None else window,
            eps,
            d**-0.5,
        )
        qkv, out, gate_up, down = matrices
        self.inputs, self.hidden = qkv.k, out.n
        self.width = qkv.n + out.k + 2 * out.n + gate_up.n + down.k
        self.at = ctypes.addressof(self.struct)

    @staticmethod
    def possible(d: int, group: int) -> bool:
        return d <= MAX_DIM and d % 2 == 0 and group <= QUERIES

    def __call__(
        self, normed: Tensor, residual: Tensor, work: Work, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """normed [T, inputs], residual [T, hidden] -> (the MLP's output, the residual stream before it is added)."""
        rows, lib = normed.shape[0], library()
        assert lib is not None and normed.is_contiguous() and normed.shape[1] == self.inputs
        assert residual.stride(1) == 1 and len(work.scratch) >= rows * self.width
        x, total = (torch.empty(rows, self.hidden, dtype=normed.dtype) for _ in range(2))
        lib.layer(
            self.at,
            ctypes.addressof(work.rows),
            normed.data_ptr(),
            residual.data_ptr(),
            residual.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            work.scratch.data_ptr(),
            x.data_ptr(),
            total.data_ptr(),
        )
        return x, total

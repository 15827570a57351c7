"""Cases of attention that rotates its rows, for tests/support/kernel_cases.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import attention_plan, paged_attention, rope_store, rotated_attention
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan
from peagle.kernels.triton.batch_invariant import paged_attention as invariant
from tests.support.comparing import near, some
from tests.support.invariant_kernel_cases import chained_products

PAGE = 16
MAX_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    d: int
    rot: int
    q_norm: bool = False
    k_norm: bool = False
    window: int | None = None
    sinks: bool = False


@dataclass
class Layer:
    """The inputs of one layer's attention; every run gets caches of its own."""

    qkv: Tensor
    rows: RowPass
    table: Tensor
    caches: Tensor  # [2, slots, kv_heads, d]
    heads: AttentionHeads
    params: AttentionParams

    @classmethod
    def create(
        cls, shape: Shape, firsts: list[int], counts: list[int], device: str, dtype: torch.dtype
    ) -> "Layer":
        heads, kv_heads, d, rot = shape.heads, shape.kv_heads, shape.d, shape.rot
        rows = new_pass(firsts, counts, device)
        angles = torch.arange(MAX_POSITIONS)[:, None] * 0.3 ** torch.arange(rot // 2)
        q_norm, k_norm = (
            (some(d, seed=seed) + 1).to(device, dtype) if has_norm else None
            for seed, has_norm in enumerate((shape.q_norm, shape.k_norm))
        )
        sinks = some(heads, seed=7).to(device, dtype) if shape.sinks else None
        slots = rows.page_tables.numel() * PAGE
        return cls(
            some(len(rows.positions), (heads + 2 * kv_heads) * d).to(device, dtype),
            rows,
            torch.cat([angles.cos(), angles.sin()], 1).to(device) * 1.1,
            some(2, slots, kv_heads, d).to(device, dtype),
            AttentionHeads(heads, kv_heads, q_norm, k_norm, 1e-6),
            AttentionParams(d**-0.5, shape.window, sinks=sinks),
        )

    def run(self, attend: Callable[..., Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The result, in which rows of no request are 7, and the caches."""
        caches = self.caches.clone()
        shape = (qkv.shape[-2], self.heads.num_heads, caches.shape[-1])
        out = torch.full(shape, 7.0, dtype=caches.dtype, device=caches.device)
        args = (qkv.clone(), self.rows, self.table, *caches, self.heads, self.params)
        return attend(*args, out), caches


def new_pass(firsts: list[int], counts: list[int], device: str) -> RowPass:
    """A row that belongs to no request lies in front of each request.

    The last page of a table is not used. A key of a new row that is not stored yet is NaN.
    """
    row_counts, first = torch.tensor(counts), torch.tensor(firsts)
    starts = (row_counts + 1).cumsum(0) - row_counts
    total = int(row_counts.sum()) + len(counts)
    pages = -(-int((first + row_counts).max()) // PAGE) + 1
    order = torch.randperm(len(counts) * pages, generator=torch.Generator().manual_seed(3))
    tables = order.view(len(counts), pages).int()
    positions = torch.zeros(total, dtype=torch.int64)
    kv_slots = torch.full((total,), -1)
    for b, (start, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        own = torch.arange(firsts[b], firsts[b] + count)
        positions[start : start + count] = own
        kv_slots[start : start + count] = tables[b, own // PAGE].long() * PAGE + own % PAGE
    on_device = (x.to(device) for x in (positions, kv_slots, tables))
    per_request = (x.to(device, torch.int32) for x in (starts, row_counts, first))
    return RowPass(*on_device, *per_request, max(counts), PAGE)


def separate(
    qkv: Tensor,
    rows: RowPass,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: AttentionHeads,
    params: AttentionParams,
    out: Tensor,
) -> Tensor:
    """The same with a kernel for each of both."""
    query = rope_store.rope_store(qkv, rows, table, keys, values, heads)
    if params.batch_invariant:
        return invariant.invariant_attention(query, keys, values, rows, params, out)
    return paged_attention.paged_attention(query, keys, values, rows, params, out)

"""Cases of attention that rotates its rows, for tests/support/kernels/kernel_cases.py.

New rows of the caches are NaN before they are stored, which detects programs that read rows stored
by other programs. The interpreter runs programs one after another, so cases run in both orders.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import interpreter

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.attention import (
    attention_plan,
    paged_attention,
    rope_store,
    rotated_attention,
)
from peagle.kernels.triton.batch_invariant import paged_attention as invariant
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan
from tests.support.kernels.comparing import near, some
from tests.support.kernels.invariant_kernel_cases import chained_products

PAGE = 16
MAX_POSITIONS = 100  # Size of the RoPE table; some positions are beyond it.
RAGGED = ([61, 0, 64, 5], [5, 8, 1, 0])  # first positions and row counts
# The parent of each node; nodes of a subtree are not adjacent.
PARENTS = [-1, 0, 0, 1, 3, 2, 4, 6, 1, *(node // 2 for node in range(9, 33))]
EXACT_PLANS = [
    AttentionPlan(2, 16, True, 4),
    AttentionPlan(8, 32, True, 4),
    AttentionPlan(2, 16, False, 4),
]


@contextmanager
def reversed_programs() -> Iterator[None]:
    """Let the interpreter run the blocks of queries and the splits of a head in reverse order."""
    builder = interpreter.InterpreterBuilder
    set_index = builder.set_grid_idx

    def set_reversed(self: Any, x: int, y: int, z: int) -> None:
        set_index(self, x, y, self.grid_dim[2] - 1 - z)

    with patch.object(builder, "set_grid_idx", set_reversed):
        yield


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    d: int
    rot: int
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Layer:
    """The inputs of one layer's attention."""

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
        sinks = some(heads, seed=7).to(device, dtype) if shape.sinks else None
        caches = some(2, rows.page_tables.numel() * PAGE, kv_heads, d).to(device, dtype)
        caches[:, rows.kv_slots[rows.kv_slots >= 0]] = float("nan")
        return cls(
            some(len(rows.positions), (heads + 2 * kv_heads) * d).to(device, dtype),
            rows,
            torch.cat([angles.cos(), angles.sin()], 1).to(device) * 1.1,
            caches,
            AttentionHeads(heads, kv_heads),
            AttentionParams(d**-0.5, shape.window, sinks=sinks),
        )

    def run(self, attend: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """The result, in which rows of no request are 7, and the caches."""
        caches = self.caches.clone()
        shape = (self.qkv.shape[-2], self.heads.num_heads, caches.shape[-1])
        out = torch.full(shape, 7.0, dtype=caches.dtype, device=caches.device)
        qkv = self.qkv.clone()
        args = (qkv, self.rows, self.table, caches[0], caches[1], self.heads, self.params)
        result = attend(*args, out)
        assert attend is not rotated_attention.rotated_attention or torch.equal(qkv, self.qkv)
        return result, caches

    def part(self, start: int, count: int) -> "Layer":
        """A separate pass with some rows of the first request."""
        rows = self.rows
        taken = slice(start, start + count)
        return replace(
            self,
            qkv=self.qkv[..., taken, :],
            rows=replace(
                rows,
                positions=rows.positions[taken],
                kv_slots=rows.kv_slots[taken],
                page_tables=rows.page_tables[:1],
                row_starts=rows.row_starts[:1] * 0,
                row_counts=rows.row_counts[:1] * 0 + count,
                first_positions=(rows.first_positions + start - rows.row_starts)[:1],
                max_rows=count,
                _cache={},
            ),
        )


def new_pass(firsts: list[int], counts: list[int], device: str) -> RowPass:
    """A row of no request is before each request.

    The last row of the first request is not stored; what the cache has there is read.
    """
    row_counts, first = torch.tensor(counts), torch.tensor(firsts)
    starts = (row_counts + 1).cumsum(0) - row_counts
    total = int(row_counts.sum()) + len(counts)
    pages = -(-int((first + row_counts).max()) // PAGE)
    order = torch.randperm(len(counts) * pages, generator=torch.Generator().manual_seed(3))
    tables = order.view(len(counts), pages).int()
    positions = torch.zeros(total, dtype=torch.int64)
    kv_slots = torch.full((total,), -1)
    for b, (start, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        own = torch.arange(firsts[b], firsts[b] + count)
        positions[start : start + count] = own
        kv_slots[start : start + count] = tables[b, own // PAGE].long() * PAGE + own % PAGE
    if len(counts) > 1:
        kv_slots[starts[0] + counts[0] - 1] = -1
    return RowPass(
        positions.to(device),
        kv_slots.to(device),
        tables.to(device),
        starts.to(device, torch.int32),
        row_counts.to(device, torch.int32),
        first.to(device, torch.int32),
        max(counts),
        PAGE,
    )


def as_trees(rows: RowPass, parents: list[int]) -> RowPass:
    """The same rows as those of trees: each request has the first nodes of one tree."""
    masks = [1]
    for row, parent in enumerate(parents[1:], start=1):
        masks.append(masks[parent] | 1 << row)
    depths = torch.tensor([mask.bit_count() - 1 for mask in masks])
    positions, tree_masks = rows.positions.clone(), torch.zeros_like(rows.positions)
    requests = (x.tolist() for x in (rows.row_starts, rows.row_counts, rows.first_positions))
    for start, count, first in zip(*requests, strict=True):
        positions[start : start + count] = first + depths[:count]
        tree_masks[start : start + count] = torch.tensor(masks[:count])
    depth = int(depths.max())
    return replace(rows, positions=positions, tree_masks=tree_masks, tree_depth=depth, _cache={})


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
    """The same computation with separate launches of rope_store and attention."""
    query = rope_store.rope_store(qkv, rows, table, keys, values, heads)
    attend: Any = paged_attention.paged_attention
    if params.batch_invariant:
        attend = invariant.invariant_attention
    return attend(query, keys, values, rows, params, out)


def assert_same(
    result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], steps: float | None
) -> None:
    """Results and caches; `steps`: see `near`, None: bit for bit."""
    for a, b in zip(result, expected, strict=True):
        a, b = a.nan_to_num(100.0), b.nan_to_num(100.0)
        if steps is None:
            assert torch.equal(a, b)
        else:
            near(a, b, steps)


def check_rotated(
    shape: Shape, firsts: list[int], counts: list[int], device: str, dtype: torch.dtype
) -> None:
    """Against the reference, and against separate kernels: the same bits.

    In the interpreter, three splits have as many programs that store as eight.
    """
    if device == "cpu":
        with patch.object(attention_plan, "MAX_SPLITS", 3):
            check_bits(shape, firsts, counts, device, dtype)
    else:
        check_bits(shape, firsts, counts, device, dtype)


def check_bits(
    shape: Shape, firsts: list[int], counts: list[int], device: str, dtype: torch.dtype
) -> None:
    whole = Layer.create(shape, firsts, counts, device, dtype)
    partial_sums = some(3, *whole.qkv.shape).to(device)
    for layer in (whole, replace(whole, qkv=partial_sums)):
        result = layer.run(rotated_attention.rotated_attention)
        assert result[0].isfinite().all()
        assert_same(result, layer.run(rotated_attention.reference), 8)
        expected = layer.run(separate)
        assert torch.equal(result[1].nan_to_num(), expected[1].nan_to_num())
        assert_same(result, expected, None if device == "cpu" else 4)
        if device == "cpu":
            with reversed_programs():
                assert_same(layer.run(rotated_attention.rotated_attention), result, None)


def check_half_precision(device: str, dtype: torch.dtype) -> None:
    """Keys are rounded where rope_store rounds. (The interpreter has no products in bf16.)"""
    check_rotated(Shape(4, 2, 16, 16), [61], [5], device, torch.float16)


def check_spread_positions(device: str, dtype: torch.dtype) -> None:
    """The angles of a row depend on `positions`, not on the position of its key."""
    layer = Layer.create(Shape(2, 1, 16, 16), [30], [6], device, dtype)
    layer.rows.positions.copy_(layer.rows.positions * 7 % 97)
    result = layer.run(rotated_attention.rotated_attention)
    assert_same(result, layer.run(rotated_attention.reference), 8)


def check_exact(
    shape: Shape, firsts: list[int], counts: list[int], device: str, dtype: torch.dtype
) -> None:
    """All plans give the bits of separate kernels."""
    check_exact_layer(Layer.create(shape, firsts, counts, device, exact_dtype(device, dtype)))


def check_exact_trees(
    shape: Shape, firsts: list[int], counts: list[int], device: str, dtype: torch.dtype
) -> None:
    layer = Layer.create(shape, firsts, counts, device, exact_dtype(device, dtype))
    check_exact_layer(replace(layer, rows=as_trees(layer.rows, PARENTS)))


def exact_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else dtype


def check_exact_layer(layer: Layer) -> None:
    device = layer.qkv.device.type
    params = replace(layer.params, batch_invariant=True)
    partial_sums = some(3, *layer.qkv.shape).to(device)
    with chained_products():
        for qkv in (layer.qkv, partial_sums):
            layer = replace(layer, qkv=qkv, params=params)
            expected = layer.run(separate)
            assert_same(expected, layer.run(rotated_attention.reference), 8)
            # In the interpreter, one plan shows that partial sums are added alike.
            plans = EXACT_PLANS[:1] if device == "cpu" and qkv is partial_sums else EXACT_PLANS
            for plan in plans:
                with patch.object(invariant, "plan_pass", return_value=plan):
                    assert_same(layer.run(rotated_attention.rotated_attention), expected, None)
            if device == "cpu":
                with reversed_programs():
                    assert_same(layer.run(rotated_attention.rotated_attention), expected, None)


def check_exact_passes(first: int, device: str, dtype: torch.dtype) -> None:
    """The rows of a request have the same bits in a batch and in passes of 1, 5 and 8 rows."""
    dtype = exact_dtype(device, dtype)
    batch = Layer.create(Shape(4, 2, 16, 16), [first, 5], [8, 3], device, dtype)
    batch = replace(batch, params=replace(batch.params, batch_invariant=True))
    slots = batch.rows.kv_slots[1:8]  # The last row is not stored.
    with chained_products():
        expected = batch.run(separate)
        for count in (1, 5, 8):
            caches = batch.caches
            for start in range(1, 9, count):
                part = replace(batch.part(start, min(count, 9 - start)), caches=caches)
                result, caches = part.run(rotated_attention.rotated_attention)
                assert torch.equal(result, expected[0][start : start + len(result)])
            assert torch.equal(caches[:, slots], expected[1][:, slots])
        assert_same(batch.run(rotated_attention.rotated_attention), expected, None)


def check_support(device: str, dtype: torch.dtype) -> None:
    """Passes that `supports_rotated_attention` accepts and refuses."""
    layer = Layer.create(Shape(4, 2, 16, 16), [61], [5], device, dtype)
    norm = torch.ones(16, device=device, dtype=dtype)

    def is_supported(exact: bool = False, **changes: Any) -> bool:
        params = AttentionParams(0.25, softcap=changes.pop("softcap", None), batch_invariant=exact)
        heads = AttentionHeads(4, 2, changes.pop("q_norm", None))
        qkv = changes.pop("qkv", layer.qkv)
        rows = replace(layer.rows, **changes, _cache={})
        return rotated_attention.supports_rotated_attention(
            qkv, rows, layer.caches[0], heads, params
        )

    assert is_supported() and is_supported(qkv=layer.qkv[None])
    assert not is_supported(q_norm=norm)
    assert not is_supported(qkv=layer.qkv.new_empty(65, layer.qkv.shape[1]))
    assert not is_supported(tree_masks=layer.rows.positions)
    assert not is_supported(bidirectional_rows=2) and not is_supported(True, bidirectional_rows=2)
    assert not is_supported(reads_new_keys=True)
    assert not is_supported(softcap=3.0)
    holds = device == "cpu" or dtype != torch.float32
    assert is_supported(exact=True) == holds
    assert is_supported(exact=True, tree_masks=layer.rows.positions) == holds
    wide = Layer.create(Shape(1, 1, 72, 16), [61], [5], device, dtype)
    assert not rotated_attention.supports_rotated_attention(
        wide.qkv,
        replace(wide.rows, tree_masks=wide.rows.positions),
        wide.caches[0],
        wide.heads,
        replace(wide.params, batch_invariant=True),
    )


CASES: dict[str, Callable[[str, torch.dtype], None]] = {
    "rotated attention": partial(check_rotated, Shape(6, 2, 16, 16), *RAGGED),
    "rotated attention, partial": partial(check_rotated, Shape(5, 1, 24, 10), [61], [5]),
    "rotated attention, sinks, window": partial(
        check_rotated, Shape(8, 1, 16, 8, window=70, sinks=True), [130, 0], [7, 3]
    ),
    "rotated attention, window shorter than the rows": partial(
        check_rotated, Shape(8, 1, 16, 16, window=3), [60], [9]
    ),
    "rotated attention, many rows": partial(check_rotated, Shape(2, 1, 16, 16), [50], [20]),
    "rotated attention, half precision": check_half_precision,
    "rotated attention, spread positions": check_spread_positions,
    "rotated attention, support": check_support,
    "exact rotated attention": partial(check_exact, Shape(3, 1, 16, 16), *RAGGED),
    "exact rotated attention, sinks, window, partial": partial(
        check_exact, Shape(4, 1, 24, 10, window=20, sinks=True), [61], [9]
    ),
    "exact rotated attention, passes": partial(check_exact_passes, 60),
    "exact rotated attention, trees": partial(
        check_exact_trees, Shape(4, 2, 16, 16), [61, 0, 5], [7, 9, 0]
    ),
    "exact rotated attention, tree in the last split and the first": partial(
        check_exact_trees, Shape(3, 1, 24, 10, window=70, sinks=True), [509], [9]
    ),
    "exact rotated attention, large tree": partial(
        check_exact_trees, Shape(2, 1, 16, 16), [60], [33]
    ),
}

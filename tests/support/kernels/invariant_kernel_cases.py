"""Cases of the batch-invariant kernels, for tests/support/kernels/kernel_cases.py.

In the interpreter, a product adds 16 inputs at once, as a tensor core does; the order of numpy
depends on the number of rows.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import interpreter

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import add_norm, skinny_gemm, swiglu
from peagle.kernels.triton.attention import paged_attention
from peagle.kernels.triton.batch_invariant import gemm, split_k, tree_lanes, vendor_gemm
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, tail_sizes
from peagle.kernels.triton.batch_invariant.paged_attention import invariant_attention
from tests.support.kernels.comparing import near, some

FUSED_INPUTS = 16
PAGE = 16
PLANS = [
    AttentionPlan(1, 16, True, 4),
    AttentionPlan(4, 16, True, 4),
    AttentionPlan(4, 16, False, 4),
    AttentionPlan(8, 32, False, 4),
    AttentionPlan(8, 32, True, 4, early_values=True),
    AttentionPlan(4, 16, True, 8, one_page=True, early_values=True, num_stages=1),
]


def plans_on(device: str) -> list[AttentionPlan]:
    """The tested plans; the interpreter runs every second one, with all block sizes."""
    return PLANS if device == "cuda" else PLANS[::2]


@contextmanager
def chained_products() -> Iterator[None]:
    """Let the interpreter add products of a dot in groups of 16, and round after each group."""
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.astype("float64"), b.data.astype("float64")
        total = d.data.copy()
        for i in range(0, left.shape[1], FUSED_INPUTS):
            inputs = slice(i, i + FUSED_INPUTS)
            total[:] = total + left[:, inputs] @ right[inputs]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = plain


def check_gemm(n: int, columns: int, bias: bool, device: str, dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if device == "cuda" else dtype
    x = (some(150, columns) / columns**0.5).to(device, dtype)
    weight = some(n, columns, seed=1).to(device, dtype)
    extra = some(n, seed=2).to(device, dtype) if bias else None
    with chained_products():
        whole = gemm.invariant_gemm(x, weight, extra)
        near(whole, skinny_gemm.reference(x, weight, extra), 4)
        for count in (1, 7, 16, 64, 65):
            assert torch.equal(gemm.invariant_gemm(x[:count], weight, extra), whole[:count])
        for tiles in (gemm.FEW_ROWS_TILES, *gemm.TILES):
            assert torch.equal(gemm.invariant_gemm(x, weight, extra, tiles=tiles), whole)


def check_split_gemm(
    n: int, columns: int, splits: int, bias: bool, device: str, dtype: torch.dtype
) -> None:
    """A row has the same partial sums in any batch; one program adds them to the same sum."""
    dtype = torch.bfloat16 if device == "cuda" else dtype
    x = (some(70, columns) / columns**0.5).to(device, dtype)
    weight = some(n, columns, seed=1).to(device, dtype)
    extra = some(n, seed=2).to(device, dtype) if bias else None
    with chained_products():
        parts = gemm.invariant_gemm(x, weight, extra, splits=splits, parallel=True)
        assert parts.shape == (splits, len(x), n) and parts.dtype == torch.float32
        near(parts, skinny_gemm.reference(x, weight, extra, splits), 10)
        for count in (1, 16, 64):
            few = gemm.invariant_gemm(x[:count], weight, extra, splits=splits)
            assert torch.equal(few, parts[:, :count])
        for early in (0, 64, columns // splits // 64 * 64) if n % 64 == 0 else ():
            sizes = skinny_gemm.TileSizes(16, 64, 2, 2, early)
            few = skinny_gemm.skinny_gemm(x[:9], weight, extra, None, sizes, splits)
            assert torch.equal(few, parts[:, :9])
        whole = split_k.add_splits(parts, dtype)
        for tiles in (gemm.FEW_ROWS_TILES, gemm.TILES[-1]):
            added = gemm.invariant_gemm(x, weight, extra, None, tiles, splits, parallel=False)
            assert added.dtype == dtype and torch.equal(added, whole)
    norm_weight = some(n, seed=3).to(device, dtype)
    residual = some(len(x), n, seed=4).to(device, dtype)
    normed = [add_norm.add_norm(y, residual, norm_weight, 1e-5) for y in (parts, whole)]
    assert all(torch.equal(a, b) for a, b in zip(*normed, strict=True))


def check_vendor_rows(device: str, dtype: torch.dtype) -> None:
    """The library is used only for row counts with the same partial sums."""
    splits = 2
    dtype = torch.bfloat16 if device == "cuda" else dtype
    x = some(75, 256).to(device, dtype)
    weight = some(64, 256, seed=1).to(device, dtype)
    calls: list[int] = []

    def library(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
        """Sums in another order for 32 rows, and does not support 24."""
        calls.append(len(x))
        if len(x) == 24:
            raise RuntimeError("not supported")
        parts = gemm.invariant_gemm(x, weight, splits=splits, parallel=True)
        return parts.flip(0) if len(x) == 32 else parts

    with (
        chained_products(),
        patch.object(gemm, "num_splits", return_value=splits),
        patch.object(vendor_gemm, "num_splits", return_value=splits),
        patch.object(vendor_gemm, "split_product", library),
    ):
        vendor_rows = vendor_gemm.VendorRows()
        vendor_rows.prove([(weight, False)], (16, 24, 32, 40))
        calls.clear()
        expected = vendor_gemm.own_product(x, weight, gated=False)
        result = vendor_rows.multiply(x, weight, gated=False)
        assert result is not None and torch.equal(result, expected)
        assert calls == [40, 16, 16]  # and 3 rows by our kernel
        assert vendor_rows.multiply(x[:9], weight, gated=False) is None


def check_gated_gemm(n: int, columns: int, device: str, dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if device == "cuda" else dtype
    x = (some(70, columns) / columns**0.5).to(device, dtype)
    weight = some(n, columns, seed=1).to(device, dtype)
    with chained_products():
        whole = gemm.gated_invariant_gemm(x, weight)
        near(whole, swiglu.reference(skinny_gemm.reference(x, weight)), 8)
        for count in (1, 9, 64):
            assert torch.equal(gemm.gated_invariant_gemm(x[:count], weight), whole[:count])


def pass_of(table: torch.Tensor, first: int, count: int) -> RowPass:
    device = table.device
    positions = torch.arange(first, first + count, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    return RowPass(positions, positions, table, zero, zero + count, zero + first, count, PAGE)


def check_chains(
    heads: int,
    kv_heads: int,
    window: int | None,
    sinks: bool,
    first: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    """A row has the same bits in every block, and in a separate pass."""
    d, count = 16, 11
    pages = -(-(first + count) // PAGE)
    caches = some(2, pages * PAGE, kv_heads, d).to(device, dtype)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()[None].to(device)
    query = some(count, heads, d, seed=4).to(device, dtype)
    sink_scores = some(heads).to(device, dtype) if sinks else None
    params = AttentionParams(d**-0.5, window, sinks=sink_scores)
    rows = pass_of(table, first, count)
    expected = paged_attention.reference(query, caches[0], caches[1], rows, params)
    with chained_products():
        results = [attend(query, caches, rows, params, plan) for plan in plans_on(device)]
        near(results[0], expected, 4)
        assert all(torch.equal(result, results[0]) for result in results)
        for i in (0, 7, count - 1):
            row = pass_of(table, first + i, 1)
            single = attend(query[i : i + 1], caches, row, params, PLANS[0])
            assert torch.equal(single[0], results[0][i])


def check_trees(
    kv_heads: int, first: int, window: int | None, device: str, dtype: torch.dtype
) -> None:
    """A row of a tree has the bits of a chain over its ancestors."""
    heads, d, nodes = 2 * kv_heads, 16, 9
    parents = [-1, 0, 0, 1, 3, 2, 4, 6, 1]
    masks = [1]
    for row in range(1, nodes):
        masks.append(masks[parents[row]] | 1 << row)
    depths = [mask.bit_count() - 1 for mask in masks]
    pages = (first + nodes) // PAGE + 1
    caches = some(2, pages * PAGE, kv_heads, d).to(device, dtype)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    query = some(nodes, heads, d, seed=4).to(device, dtype)
    params = AttentionParams(d**-0.5, window)
    rows = pass_of(table, first, nodes)
    rows.positions = first + torch.tensor(depths, device=device)
    rows.tree_masks = torch.tensor(masks, device=device)
    unknown_depth = replace(rows, _cache={})
    rows.tree_depth = max(depths)
    with chained_products():
        results = [attend(query, caches, rows, params, plan) for plan in plans_on(device)]
        results.append(attend(query, caches, unknown_depth, params, PLANS[1]))
        tiles = [PLANS[0]._replace(block_rows=8, tail_lanes=lanes) for lanes in (16, 32)]
        results += [attend(query, caches, rows, params, plan) for plan in tiles]
        assert all(torch.equal(result, results[0]) for result in results)
        for leaf in set(range(nodes)) - set(parents):
            path = [i for i in range(nodes) if masks[leaf] >> i & 1]
            moved = caches.clone()
            moved[:, first : first + len(path)] = caches[:, [first + i for i in path]]
            chain = pass_of(table, first, len(path))
            single = attend(query[path], moved, chain, params, PLANS[2])
            assert torch.equal(single, results[0][path])


def check_tree_lanes(depth: int, device: str, dtype: torch.dtype) -> None:
    """Trees of several requests, one of which has no rows; the pages of one end in its tree."""
    parents = [[-1, 0, 1, 2, 0], [], [-1, 0, 0, 2, 2, 4]]
    masks: list[int] = []
    for tree in parents:
        start = len(masks)
        for row, parent in enumerate(tree):
            masks.append(1 if parent < 0 else masks[start + parent] | 1 << row)
    counts = torch.tensor([len(tree) for tree in parents], dtype=torch.int32, device=device)
    firsts = torch.tensor([77, 0, 93], dtype=torch.int32, device=device)
    starts = counts.cumsum(0).int() - counts
    tables = torch.randperm(18).int().view(3, 6).to(device)
    depths = torch.tensor([mask.bit_count() - 1 for mask in masks], device=device)
    positions = firsts.long().repeat_interleave(counts) + depths
    tree_masks = torch.tensor(masks, device=device)
    rows = RowPass(positions, positions, tables, starts, counts, firsts, 6, PAGE, tree_masks, depth)
    for block_rows, tile in ((5, 16), (2, 32), (6, 64)):
        sizes = tree_lanes.lane_sizes(rows, block_rows, 64, tile)
        lanes = tree_lanes.tree_lanes(rows, sizes)
        expected = tree_lanes.reference(rows, sizes)
        assert torch.equal(lanes.order, expected.order)
        assert torch.equal(lanes.row_positions, expected.row_positions)
        for b, q, p in itertools.product(*map(range, lanes.counts.shape)):
            if q * block_rows >= counts[b]:
                continue
            count = int(expected.counts[b, q, p])
            assert lanes.counts[b, q, p] == count
            assert lanes.ends[b, q] == expected.ends[b, q]
            used = slice(-(-count // tile) * tile)
            for own, other in zip(lanes[-3:], expected[-3:], strict=True):
                assert torch.equal(own[b, q, p, used], other[b, q, p, used])
    sizes = tree_lanes.lane_sizes(rows, 5, 64, 16)
    check_worked_example(rows, tree_lanes.tree_lanes(rows, sizes))


def check_worked_example(rows: RowPass, lanes: tree_lanes.TreeLanes) -> None:
    """The example in tree_lanes.py."""
    assert lanes.order[:5].tolist() == [0, 4, 1, 2, 3]
    assert lanes.row_positions[:5].tolist() == [77, 78, 78, 79, 80]
    assert lanes.ends[0, 0] == 81
    assert lanes.counts[0, 0].tolist()[:1] == [48]
    table = rows.page_tables[0].tolist()
    positions = [*range(64, 79), 81, *range(64, 80), 80]
    slots = [table[x // PAGE] * PAGE + x % PAGE for x in positions]
    assert lanes.slots[0, 0, 0, :48].tolist() == slots + [-1] * 15
    seen = [0b111] * 14 + [0b100, 0b010] + [0b11000] * 16 + [0b10000] + [0] * 15
    assert lanes.rows[0, 0, 0, :48].tolist() == seen


def check_one_page(first: int, tree: bool, device: str, dtype: torch.dtype) -> None:
    """A block of keys in one page gives the same result if it is looked up once or by key."""
    d, count, page_size = 16, 7, 128
    pages = (first + count) // page_size + 1
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()[None].to(device)
    caches = some(2, pages * page_size, 2, d).to(device, dtype)
    query = some(count, 4, d, seed=4).to(device, dtype)
    rows = replace(pass_of(table, first, count), page_size=page_size)
    if tree:  # the parents - 0 0 1 2 2 4
        rows.tree_masks = torch.tensor([1, 3, 5, 11, 21, 37, 85], device=device)
        rows.positions = first + torch.tensor([0, 1, 1, 2, 2, 2, 3], device=device)
    expected = paged_attention.reference(
        query, caches[0], caches[1], rows, AttentionParams(d**-0.5)
    )
    plans = [
        plan._replace(one_page=one_page, early_values=one_page)
        for plan in PLANS[2::2]
        for one_page in (False, True)
    ]
    with chained_products():
        params = AttentionParams(d**-0.5)
        results = [attend(query, caches, rows, params, plan) for plan in plans]
    near(results[0], expected, 4)
    assert all(torch.equal(result, results[0]) for result in results)


def check_rows_after_the_pages(device: str, dtype: torch.dtype) -> None:
    """Rows whose window starts after the last page see no keys, but are written."""
    d, count, first = 16, 11, 511
    table = torch.arange(32, dtype=torch.int32, device=device)[None]
    caches = some(2, 32 * PAGE, 1, d).to(device, dtype)
    query = some(count, 1, d, seed=4).to(device, dtype)
    rows = pass_of(table, first, count)
    params = AttentionParams(d**-0.5, 3)
    with chained_products():
        results = [attend(query, caches, rows, params, plan) for plan in plans_on(device)]
    assert all(torch.equal(result[:3], results[0][:3]) for result in results)
    assert all(result.isfinite().all() for result in results)


def attend(
    query: torch.Tensor,
    caches: torch.Tensor,
    rows: RowPass,
    params: AttentionParams,
    plan: AttentionPlan,
) -> torch.Tensor:
    sizes = tail_sizes(rows, query.shape[2], plan)
    if sizes is not None:
        tree_lanes.tree_lanes(rows, sizes)
    # A kernel between both: attention reads lanes before it waits.
    out = torch.full_like(query, math.nan)  # Every row must be written.
    return invariant_attention(query, caches[0], caches[1], rows, params, out, plan=plan)


CASES: dict[str, Callable[[str, torch.dtype], None]] = {
    "exact product": partial(check_gemm, 128, 192, False),
    "exact product, bias": partial(check_gemm, 192, 128, True),
    "exact product, odd outputs": partial(check_gemm, 100, 64, False),
    "exact product, splits": partial(check_split_gemm, 64, 256, 2, False),
    "exact product, splits, bias": partial(check_split_gemm, 128, 384, 3, True),
    "exact product, splits, odd outputs": partial(check_split_gemm, 100, 256, 4, False),
    "exact product, splits, library": check_vendor_rows,
    "exact gated product": partial(check_gated_gemm, 256, 64),
    "exact attention": partial(check_chains, 6, 2, None, False, 57),
    "exact attention, more blocks of keys than splits": partial(
        check_chains, 1, 1, None, True, 569
    ),
    "exact attention, window, sinks": partial(check_chains, 2, 1, 20, True, 57),
    "exact attention, rows after the pages": check_rows_after_the_pages,
    "exact trees, lanes": partial(check_tree_lanes, 3),
    "exact trees, lanes of an unknown depth": partial(check_tree_lanes, 0),
    "exact trees": partial(check_trees, 2, 60, None),
    "exact trees, window": partial(check_trees, 1, 131, 70),
    "exact trees, window that ends beside them": partial(check_trees, 1, 66, 3),
    "exact trees, in the last split and the first": partial(check_trees, 1, 509, None),
    "exact trees, first token": partial(check_trees, 1, 0, None),
    "exact trees, more blocks of keys than splits": partial(check_trees, 1, 701, None),
    "exact attention, a block of keys in one page": partial(check_one_page, 187, False),
    "exact trees, a block of keys in one page": partial(check_one_page, 253, True),
}

"""The attention of exact mode: its bits in any batch, chain or tree."""

# ruff: noqa: B023 - jobs run before the next iteration
# mypy: disable-error-code="misc, arg-type, assignment, call-arg, return-value"

import random

import torch
from torch import Tensor

from benchmarks.exact.kernels import CACHES, DEVICE, compare
from benchmarks.exact.part_report import PartReport
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, tail_sizes
from peagle.kernels.triton.batch_invariant.paged_attention import (
    invariant_attention,
    plan_pass,
)
from peagle.kernels.triton.batch_invariant.tree_lanes import tree_lanes

HEADS = {"smollm2": (9, 3, 64), "8b": (32, 8, 128), "gpt-oss": (64, 8, 64)}
PAGE_SIZE = 64


def chain_rows(counts: list[int], firsts: list[int], pages: int = 0) -> RowPass:
    """Rows of chains; request b has the pages b * pages .. of the cache, in a random order."""
    pages = pages or max(-(-(f + c) // PAGE_SIZE) for f, c in zip(firsts, counts, strict=True))
    batch = len(counts)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    tables = order.view(batch, pages).int()
    numbers = torch.tensor(counts)
    owner = torch.arange(batch).repeat_interleave(numbers)
    starts = numbers.cumsum(0) - numbers
    positions = torch.tensor(firsts)[owner] + torch.arange(len(owner)) - starts[owner]
    slots = tables[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    small = (starts, numbers, torch.tensor(firsts))
    return RowPass(
        positions.to(DEVICE),
        slots.to(DEVICE),
        tables.to(DEVICE),
        *(x.to(DEVICE, torch.int32) for x in small),
        max(counts),
        PAGE_SIZE,
    )


def tree_rows(batch: int, nodes: int, depth: int, firsts: list[int]) -> RowPass:
    """Random trees of `nodes` rows each, no deeper than `depth`."""
    rows = chain_rows([nodes] * batch, firsts)
    rng = random.Random(nodes)
    masks: list[int] = []
    depths: list[int] = []
    for _ in range(batch):
        own_masks, own_depths = [1], [0]
        for row in range(1, nodes):
            parent = rng.choice([i for i in range(row) if own_depths[i] < depth])
            own_masks.append(own_masks[parent] | 1 << row)
            own_depths.append(own_depths[parent] + 1)
        masks += own_masks
        depths += own_depths
    rows.tree_masks = torch.tensor(masks, device=DEVICE)
    first = torch.tensor(firsts).repeat_interleave(nodes).to(DEVICE)
    rows.positions = first + torch.tensor(depths, device=DEVICE)
    rows.tree_depth = depth
    CACHES.append(rows._cache)
    return rows


def new_caches(rows: RowPass, kv_heads: int, d: int) -> tuple[Tensor, Tensor]:
    slots = rows.page_tables.numel() * rows.page_size
    generator = torch.Generator(DEVICE).manual_seed(d)
    shape = (2, slots, kv_heads, d)
    caches = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
    return caches[0], caches[1]


def attend(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    rows: RowPass,
    params: AttentionParams,
    plan: AttentionPlan | None = None,
) -> Tensor:
    plan = plan or plan_pass(rows, query.shape[1], caches[0])
    sizes = tail_sizes(rows, query.shape[2], plan)
    if sizes is not None:
        tree_lanes(rows, sizes)
    # A kernel between both: attention reads lanes before it waits.
    out = torch.zeros_like(query)
    return invariant_attention(query, *caches, rows, params, out, plan=plan)


def plans(group: int) -> list[AttentionPlan]:
    smallest = max(16, 1 << (group - 1).bit_length())
    sizes = [(16, 8), (16, 4), (32, 8), (32, 4), (64, 4), (64, 8)]
    return [
        AttentionPlan(queries // group, queries, parallel, warps)
        for queries, warps in sizes
        for parallel in (False, True)
        if queries >= smallest
    ]


def check_chains(report: PartReport) -> None:
    rng = random.Random(0)
    counts = [1, 8, 8, 16, 100, 3, 1, 12]
    firsts = [rng.randrange(0, 1500) for _ in counts]
    for name, (heads, kv_heads, d) in HEADS.items():
        rows = chain_rows(counts, firsts)
        caches = new_caches(rows, kv_heads, d)
        query = torch.randn(sum(counts), heads, d, device=DEVICE).bfloat16()
        is_oss = name == "gpt-oss"
        sinks = torch.randn(heads, device=DEVICE).bfloat16() if is_oss else None
        params = AttentionParams(d**-0.5, 128 if is_oss else None, sinks=sinks)
        jobs = {
            str(tuple(plan)): lambda p=plan: attend(query, caches, rows, params, p)
            for plan in plans(heads // kv_heads)
        }

        def alone() -> Tensor:
            results = []
            position = rows.positions.int()
            for i, b in enumerate(
                torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            ):
                one = torch.ones(1, dtype=torch.int32, device=DEVICE)
                row = RowPass(
                    rows.positions[i : i + 1],
                    rows.kv_slots[i : i + 1],
                    rows.page_tables[b : b + 1],
                    one * 0,
                    one,
                    position[i : i + 1],
                    1,
                    PAGE_SIZE,
                )
                results.append(attend(query[i : i + 1], caches, row, params))
            return torch.cat(results)

        report.add(bits=f"attention, chains, {name}", differing=compare(jobs, alone))


def check_trees(report: PartReport) -> None:
    """Rows of trees against chains over their ancestors."""
    for name, (heads, kv_heads, d) in HEADS.items():
        firsts = [0, 3, 57, 64, 123, 700, 1023]
        nodes = 32
        rows = tree_rows(len(firsts), nodes, 11, firsts)
        caches = new_caches(rows, kv_heads, d)
        query = torch.randn(len(firsts) * nodes, heads, d, device=DEVICE).bfloat16()
        params = AttentionParams(d**-0.5)
        jobs = {
            str(tuple(plan)): lambda p=plan: attend(query, caches, rows, params, p)
            for plan in plans(heads // kv_heads)
        }
        result = lambda: chains_of_trees(query, caches, rows, params, firsts, nodes)  # noqa: E731
        report.add(bits=f"attention, trees, {name}", differing=compare(jobs, result))


def chains_of_trees(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    rows: RowPass,
    params: AttentionParams,
    firsts: list[int],
    nodes: int,
) -> Tensor:
    """Every row of a tree as the last row of a chain of its ancestors, at their positions."""
    assert rows.tree_masks is not None
    results = []
    table = rows.page_tables.cpu()
    for i, mask in enumerate(rows.tree_masks.tolist()):
        b = i // nodes
        path = [row for row in range(nodes) if mask >> row & 1]
        places = torch.tensor([firsts[b] + row for row in path])
        chain = torch.arange(firsts[b], firsts[b] + len(path))
        old, new = (
            (table[b, x // PAGE_SIZE].long() * PAGE_SIZE + x % PAGE_SIZE).to(DEVICE)
            for x in (places, chain)
        )
        moved = tuple(cache.clone() for cache in caches)
        for cache, source in zip(moved, caches, strict=True):
            cache[new] = source[old]
        chain_pass = chain_rows([len(path)], [firsts[b]], rows.page_tables.shape[1])
        chain_pass.page_tables = rows.page_tables[b : b + 1]
        own = query[[b * nodes + row for row in path]]
        results.append(attend(own, (moved[0], moved[1]), chain_pass, params)[-1:])
    return torch.cat(results)

"""Cases of rotation and attention in one launch, for tests/support/kernel_cases.py."""

from functools import partial

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import paged_attention, rope_attention, rope_store
from tests.support.comparing import near, some

PAGE_SIZE = 16


def some_pass(counts: list[int], ends: list[int], device: str) -> RowPass:
    """The rows of request b are the last counts[b] positions before ends[b], then padding."""
    batch = len(counts)
    pages = -(-max(ends) // PAGE_SIZE)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3))
    tables = order.view(batch, pages).int()
    row_counts = torch.tensor(counts, dtype=torch.int32)
    firsts = torch.tensor(ends, dtype=torch.int32) - row_counts
    positions = [f + i for f, n in zip(firsts.tolist(), counts, strict=True) for i in range(n)]
    owners = torch.arange(batch).repeat_interleave(row_counts.long())
    at = torch.tensor(positions)
    slots = tables[owners, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE
    return RowPass(
        torch.cat([at, torch.zeros(1, dtype=torch.long)]).to(device),
        torch.cat([slots, torch.tensor([-1])]).to(device),
        tables.to(device),
        (row_counts.cumsum(0) - row_counts).int().to(device),
        row_counts.to(device),
        firsts.to(device),
        max(counts),
        PAGE_SIZE,
    )


def check_rope_attention(
    heads: int,
    kv_heads: int,
    d: int,
    counts: list[int],
    ends: list[int],
    device: str,
    dtype: torch.dtype,
    norms: bool = False,
    sinks: bool = False,
    window: int | None = None,
    tree: bool = False,
    bidirectional_rows: int = 0,
) -> None:
    """Against two launches, bit for bit, and against the reference."""
    rows = some_pass(counts, ends, device)
    rows.bidirectional_rows = bidirectional_rows
    if not bidirectional_rows:  # The last row of the first request is not stored.
        rows.kv_slots[counts[0] - 1] = -1
    if tree:  # Each row attends to itself and to every second row in front of it.
        own = torch.cat([torch.arange(n) for n in counts])
        bits = torch.stack([(1 << torch.arange(0, i + 1, 2)).sum() | 1 << i for i in own])
        rows.tree_masks = torch.cat([bits, bits[:1]]).to(device)
    q_norm, k_norm = ((some(d, seed=i) + 1).to(device, dtype) if norms else None for i in (0, 1))
    layer_heads = AttentionHeads(heads, kv_heads, q_norm, k_norm, 1e-6)
    sink_scores = some(heads).to(device, dtype) if sinks else None
    params = AttentionParams(d**-0.5, window, None, sink_scores)
    angles = torch.arange(max(ends) - 1)[:, None] * 0.3 ** torch.arange(d // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    size = rows.page_tables.numel() * PAGE_SIZE
    width = (heads + 2 * kv_heads) * d
    live = sum(counts)

    def caches() -> Tensor:
        return some(2, size, kv_heads, d).to(device, dtype)

    for qkv in (some(live + 1, width).to(device, dtype), some(3, live + 1, width).to(device)):
        assert rope_attention.supports_rope_attention(qkv, table, caches()[0])
        for splits in (1, 3):
            own, other, plain = caches(), caches(), caches()
            result = rope_attention.rope_attention(
                qkv, rows, table, own[0], own[1], layer_heads, params, splits=splits
            )
            query = rope_store.rope_store(qkv.clone(), rows, table, other[0], other[1], layer_heads)
            expected = paged_attention.paged_attention(
                query, other[0], other[1], rows, params, splits=splits
            )
            assert torch.equal(own, other)
            stored = rows.kv_slots >= 0
            assert torch.equal(result[stored], expected[stored])
            reference = rope_attention.reference(
                qkv.clone(), rows, table, plain[0], plain[1], layer_heads, params
            )
            near(result[stored], reference[stored], 8)


CASES = {
    "rope_attention, one row": partial(check_rope_attention, 8, 2, 32, [1, 1, 1], [65, 2, 201]),
    "rope_attention, verify": partial(
        check_rope_attention, 9, 3, 64, [5, 5, 5], [5, 67, 131], norms=True
    ),
    "rope_attention, ragged": partial(
        check_rope_attention, 16, 2, 16, [3, 8, 1], [3, 90, 65], sinks=True, window=20
    ),
    "rope_attention, narrow window": partial(check_rope_attention, 32, 2, 16, [8], [70], window=2),
    "rope_attention, tree": partial(check_rope_attention, 6, 2, 32, [7, 7], [70, 40], tree=True),
    "rope_attention, both ways": partial(
        check_rope_attention, 8, 1, 16, [6, 4], [67, 30], bidirectional_rows=3
    ),
}

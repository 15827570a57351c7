"""Cases of the kernels that draft trees need, for tests/support/kernels/kernel_cases.py."""

from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.slot_state import SlotBatch, SlotState
from peagle.kernels.triton import (
    accept_tree,
    build_tree,
    candidate_pairs,
    candidates,
    compact_kv,
    gather_rows,
)
from peagle.kernels.triton.attention import paged_attention
from tests.support.kernels.comparing import near, same_fields, some


def some_tree(
    batch: int, k: int, nodes: int, dependent: bool, seed: int = 0
) -> tuple[Tensor, Tensor, build_tree.DraftTrees]:
    """(logp, tokens, the trees built from them)"""
    logits = some(batch, k, 16 if dependent else 1, 16, seed=seed) * 2
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(99, generator=generator)[:16] for _ in range(batch * k)])
    tokens = tokens.view(batch, k, 16)
    logp = logits.log_softmax(-1)
    trees = no_trees(batch, k, nodes)
    build_tree.reference(logp, tokens, None, nodes, torch.arange(batch), trees)
    return logp, tokens, trees


def no_trees(slots: int, k: int, nodes: int, device: str = "cpu") -> build_tree.DraftTrees:
    chain, ids, masks = (
        torch.zeros(slots, n, dtype=torch.long, device=device) for n in (k, nodes, nodes + 1)
    )
    parents, depths = torch.zeros(2, slots, nodes, dtype=torch.int32, device=device)
    return build_tree.DraftTrees(chain, ids, parents, depths, masks)


def check_build_tree(
    batch: int, k: int, nodes: int, dependent: bool, device: str, dtype: torch.dtype
) -> None:
    logp, tokens, expected = some_tree(batch, k, nodes, dependent)
    index = torch.arange(batch).flip(0) + 1  # the slot of each
    result = no_trees(batch + 2, k + 1, nodes + 3, device)
    target_ids = torch.arange(99).flip(0)
    build_tree.build_tree(
        logp.to(device),
        98 - tokens.to(device),
        target_ids.to(device),
        nodes,
        index.to(device),
        result,
    )
    for name, a, b in zip(expected._fields, result, expected, strict=True):
        written = a.cpu()[:, : b.shape[1]]
        assert written.dtype == b.dtype and torch.equal(written[index], b), name
        assert not written[[0, -1]].any(), f"{name}: another slot"
        assert not a[:, b.shape[1] :].any(), f"{name}: after the tree"


def check_accept_tree(batch: int, k: int, nodes: int, device: str, dtype: torch.dtype) -> None:
    """The target's tokens agree with a random path up to some depth."""
    slots = batch + 3
    _, _, tree = some_tree(slots, k, nodes, dependent=True)
    generator = torch.Generator().manual_seed(nodes)
    index = torch.randperm(slots, generator=generator)[:batch]
    ids = torch.cat([torch.zeros(batch, 1, dtype=torch.long), tree.nodes[index]], 1)
    tokens = torch.full((batch, nodes + 1), 100)
    for b in range(batch):
        agreeing = torch.randperm(nodes, generator=generator).tolist()[: nodes // 2]
        for node in agreeing:  # some parents agree with a child
            tokens[b, tree.parents[index[b], node]] = tree.nodes[index[b], node]
    tokens[0, 0] = tree.chain[index[0], 0]
    tokens[1, 0] = 100
    first = torch.randint(0, 50, (batch,), generator=generator).int()
    ends = first + torch.randint(1, k + 3, (batch,), generator=generator).int()
    top_logits = some(batch, nodes + 1)
    broken = torch.arange(batch) % 3 == 1
    top_logits[broken, nodes // 2] = torch.inf
    trees = build_tree.DraftTrees(*(x.to(device) for x in tree))
    slot_batch = SlotBatch(*(x.to(device) for x in (index, first, ends)))
    inputs = (tokens.to(device), top_logits.to(device), ids.to(device))
    state, expected_state = ones_state(slots, device), ones_state(slots, device)
    result = accept_tree.accept_tree(*inputs, trees, slot_batch, state, k)
    expected = accept_tree.reference(*inputs, trees, slot_batch, expected_state, k)
    same_fields(result, expected)
    same_fields(state, expected_state)
    outputs = [x.cpu() for x in expected if x is not None]
    accepted, newest, path_rows, flat_rows, path_ids, packed = outputs
    assert torch.equal(ids.flatten()[flat_rows].view(path_rows.shape), path_ids)
    path_tokens = packed[:, : k + 1]
    packed_accepted, packed_broken, chain_accepted, path_mask = packed[:, k + 1 :].T
    assert torch.equal(tokens.flatten()[flat_rows].view(path_rows.shape), path_tokens)
    assert torch.equal(packed_accepted, accepted.long())
    assert torch.equal(packed_broken, broken.long())
    for b in range(batch):  # The expected values, computed step by step.
        row = 0
        depth = 0
        while depth < ends[b] - 1 - first[b]:
            children = [n + 1 for n in range(nodes) if tree.parents[index[b], n] == row]
            matching = [child for child in children if ids[b, child] == tokens[b, row]]
            if not matching:
                break
            row = matching[0]
            depth += 1
            assert path_rows[b, depth] == row
        assert accepted[b] == depth and newest[b] == tokens[b, row]
        assert path_mask[b] == sum(1 << row for row in path_rows[b, : depth + 1].tolist())
        known = path_tokens[b, : depth + 1].tolist()
        pairs = zip(tree.chain[index[b]].tolist(), known, strict=False)
        assert chain_accepted[b] == len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert accepted.max() > 1 and len(set(chain_accepted.tolist())) > 1


def ones_state(slots: int, device: str) -> SlotState:
    ones = torch.ones(slots, dtype=torch.int32, device=device)
    return SlotState(ones[:, None], ones.clone(), ones.clone(), ones.clone(), ones.long())


def check_compact_kv(batch: int, layers: int, width: int, device: str, dtype: torch.dtype) -> None:
    page_size, pages, k = 4, 6, 5
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    tables = order.view(batch, pages).int()
    generator = torch.Generator().manual_seed(width)
    path = torch.stack(
        [torch.randperm(15, generator=generator)[:k].sort().values + 1 for _ in range(batch)]
    )
    path = torch.cat([torch.zeros(batch, 1, dtype=torch.long), path], 1)
    first = torch.randint(0, 8, (batch,), generator=generator).int()
    accepted = torch.randint(0, k + 1, (batch,), generator=generator).int()
    accepted[0] = k
    caches = [some(layers, batch * pages * page_size, width).to(device, dtype) for _ in range(2)]
    for run, cache in zip((compact_kv.compact_kv, compact_kv.reference), caches, strict=True):
        inputs = (first.to(device), accepted.to(device), path.to(device), tables.to(device))
        run(cache, *inputs, page_size)
    assert torch.equal(*caches)
    before = some(layers, batch * pages * page_size, width).to(device, dtype)

    def slot(position: int) -> int:
        return int(tables[0, position // page_size]) * page_size + position % page_size

    for depth, row in enumerate(path[0].tolist()):
        moved = caches[0][:, slot(int(first[0]) + depth)]
        assert torch.equal(moved, before[:, slot(int(first[0]) + row)])


def check_candidates(rows: int, size: int, count: int, device: str, dtype: torch.dtype) -> None:
    logits = (some(rows, size + 3) * 3).to(device, dtype)[:, :size]
    logits[0, size // 2 :] = logits[0].max()  # the first of equals counts
    logits[1] = 1
    logits[2, : size // 2] = -torch.inf  # whole pieces
    factor = torch.linspace(0.5, 1.5, rows, device=device)
    result = candidates.candidates(logits, factor, count)
    expected = candidates.reference(logits, factor, count)
    order = (logits.float() * factor[:, None]).sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(result.ids, order[:, :count])
    near(result.logits, expected.logits)
    near(result.logsumexp, expected.logsumexp, 8)


def check_candidate_pairs(batch: int, k: int, rank: int, device: str, dtype: torch.dtype) -> None:
    rows, size = batch * k, 40
    logits = (some(rows, size) * 2).to(device)
    factor = torch.linspace(0.5, 1.5, rows, device=device)
    top = candidates.reference(logits, factor, 16)
    drawn = (some(n, rank, seed=i) / rank**0.5 for i, n in enumerate((rows, size, size)))
    here, before, after = (x.to(device, dtype) for x in drawn)
    terms = candidate_pairs.DependencyTerms(here, before, after * 3)
    result = candidate_pairs.candidate_pairs(top, factor, terms, k)
    expected = candidate_pairs.reference(top, factor, terms, k)
    near(result, expected, 40)
    logp = (logits * factor[:, None]).log_softmax(-1).gather(1, top.ids)
    # The first row of a block is not corrected.
    near(expected[::k], logp[::k, None].expand(-1, 16, -1), 8)
    assert (expected[1] - expected[1, 0]).abs().max() > 0.05
    assert (expected.exp().sum(-1) < 1.0001).all()


def check_gather_trees(batch: int, nodes: int, device: str, dtype: torch.dtype) -> None:
    slots, page_size, pages, k = batch + 2, 4, 20, 5
    _, _, tree = some_tree(slots, k, nodes, dependent=False)
    generator = torch.Generator().manual_seed(batch)
    tables = torch.randperm(slots * pages, generator=generator).view(slots, pages).int()
    max_length = pages * page_size - nodes - 1
    lengths = torch.randint(0, max_length, (slots,), generator=generator).int()
    ends = lengths + torch.randint(1, 7, (slots,), generator=generator).int()
    newest = torch.arange(slots)
    index = torch.randperm(slots, generator=generator)[:batch].to(device)
    state = SlotState(*(x.to(device) for x in (tables, lengths, ends, lengths, newest)))
    trees = build_tree.DraftTrees(*(x.to(device) for x in tree))
    for width in (nodes + 1, nodes // 2):  # a smaller tree is the beginning of a larger one
        shape = DraftShape(k, width - 1)
        result = gather_rows.gather_rows(index, shape, page_size, state, trees)
        same_fields(result, gather_rows.reference(index, shape, page_size, state, trees))
        stored = result.kv_slots[result.kv_slots >= 0]
        assert len(stored) == len(stored.unique())
        first_rows = result.positions.view(batch, width)[:, 0]
        assert first_rows.equal(result.first_positions.long())


def check_tree_attention(
    heads: int,
    kv_heads: int,
    nodes: int,
    device: str,
    dtype: torch.dtype,
    window: int | None = None,
    sinks: bool = False,
) -> None:
    """A row of a tree gives what the last row of its path gives in a chain."""
    batch, page_size, d, k, pages = 2, 16, 16, 5, 8
    _, _, tree = some_tree(batch, k, nodes, dependent=True)
    first = torch.tensor([37, 3]).int()
    width = nodes + 1
    tables = torch.arange(batch * pages).view(batch, pages).int()
    caches = some(2, batch * pages * page_size, kv_heads, d)
    drawn_query = some(batch * width, heads, d)
    depths = torch.cat([torch.zeros(batch, 1).int(), tree.depths], 1)
    positions = (first[:, None] + depths).flatten().long()
    starts = torch.tensor([0, width]).int()
    counts = torch.tensor([width, width]).int()
    query, keys, values = (x.to(device, dtype) for x in (drawn_query, caches[0], caches[1]))
    rows = RowPass(
        positions.to(device),
        positions.to(device),
        tables.to(device),
        starts.to(device),
        counts.to(device),
        first.to(device),
        width,
        page_size,
        tree.masks.flatten().to(device),
    )
    sink_scores = some(heads).to(device, dtype) if sinks else None
    params = AttentionParams(d**-0.5, window, sinks=sink_scores)
    expected = paged_attention.reference(query, keys, values, rows, params)
    for splits in (None, 1, 3) if device == "cuda" else (1, 3):
        result = paged_attention.paged_attention(query, keys, values, rows, params, splits=splits)
        near(result, expected, 4)
    b, row = 1, nodes  # The last node as a separate chain.
    path = [i for i in range(width) if tree.masks[b, row] >> i & 1]
    chain_keys, chain_values = (
        torch.cat([x[: first[b]], x[first[b] + torch.tensor(path)]])
        for x in (cache[b * pages * page_size :] for cache in (keys, values))
    )
    zero = torch.tensor([0]).int().to(device)
    last = zero + int(first[b]) + len(path) - 1
    chain = RowPass(
        last, last, torch.arange(4, device=device)[None], zero, zero + 1, last, 1, page_size
    )
    single = paged_attention.reference(
        query[b * width + row][None], chain_keys, chain_values, chain, params
    )
    near(expected[b * width + row][None], single, 4)


def check_bidirectional_attention(bidirectional_rows: int, device: str, dtype: torch.dtype) -> None:
    """The last rows of a request attend to each other; the other rows do not change."""
    page_size, d = 16, 16
    counts = torch.tensor([7, 3]).int()
    first = torch.tensor([20, 0]).int()
    starts = torch.tensor([0, 7]).int()
    tables = torch.arange(6).view(2, 3).int()
    query, caches = some(10, 4, d), some(2, 6 * page_size, 2, d)
    tensors = (
        query.to(device, dtype),
        caches[0].to(device, dtype),
        caches[1].to(device, dtype),
    )
    unused = torch.zeros(10, dtype=torch.long, device=device)
    causal_pass = RowPass(
        unused,
        unused,
        tables.to(device),
        starts.to(device),
        counts.to(device),
        first.to(device),
        7,
        page_size,
    )
    rows = replace(causal_pass, bidirectional_rows=bidirectional_rows, _cache={})
    params = AttentionParams(d**-0.5)
    expected = paged_attention.reference(*tensors, rows, params)
    causal = paged_attention.reference(*tensors, causal_pass, params)
    for splits in (None, 1, 3) if device == "cuda" else (1, 3):
        near(paged_attention.paged_attention(*tensors, rows, params, splits=splits), expected, 4)
    causal_rows = 7 - bidirectional_rows
    near(expected[:causal_rows], causal[:causal_rows])
    near(expected[6], causal[6])
    changed = expected[causal_rows].float(), causal[causal_rows].float()
    assert not torch.allclose(*changed, atol=1e-2)


CASES = {
    "grow": partial(check_build_tree, 3, 7, 32, True),
    "grow, independent": partial(check_build_tree, 5, 4, 31, False),
    "grow, chain alone": partial(check_build_tree, 3, 7, 0, True),
    "grow, the largest": partial(check_build_tree, 1, 11, 62, True),
    "walk": partial(check_accept_tree, 9, 7, 32),
    "walk, the largest": partial(check_accept_tree, 4, 5, 62),
    "move": partial(check_compact_kv, 5, 3, 40),
    "move, wide": partial(check_compact_kv, 2, 2, 300),
    "candidates": partial(check_candidates, 7, 5000, 16),
    "candidates, few": partial(check_candidates, 3, 20, 4),
    "pairs": partial(check_candidate_pairs, 3, 5, 64),
    "pairs, odd rank": partial(check_candidate_pairs, 2, 7, 24),
    "take, trees": partial(check_gather_trees, 6, 32),
    "attention, trees": partial(check_tree_attention, 6, 2, 32),
    "attention, trees in a window": partial(check_tree_attention, 4, 4, 20, window=21),
    "attention, trees with sinks in a window": partial(
        check_tree_attention, 4, 2, 24, window=30, sinks=True
    ),
    "attention, both ways": partial(check_bidirectional_attention, 4),
}

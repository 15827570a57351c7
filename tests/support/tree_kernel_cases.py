"""The cases of the kernels that trees need, for tests/test_engine_kernels.py: each against its reference."""

from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.triton import (
    accept_tree,
    build_tree,
    candidate_pairs,
    candidates,
    compact_kv,
    gather_rows,
    paged_attention,
)
from tests.support.comparing import near, some


def some_tree(
    batch: int, k: int, nodes: int, wide: bool, seed: int = 0
) -> tuple[Tensor, Tensor, build_tree.DraftTrees]:
    """(logp, tokens, the trees grown from them)"""
    logits = some(batch, k, 16 if wide else 1, 16, seed=seed) * 2
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(99, generator=generator)[:16] for _ in range(batch * k)])
    logp, tokens = logits.log_softmax(-1), tokens.view(batch, k, 16)
    trees = no_trees(batch, k, nodes)
    build_tree.reference(logp, tokens, None, nodes, torch.arange(batch), trees)
    return logp, tokens, trees


def no_trees(places: int, k: int, nodes: int, device: str = "cpu") -> build_tree.DraftTrees:
    chain, ids, masks = (
        torch.zeros(places, n, dtype=torch.long, device=device) for n in (k, nodes, nodes + 1)
    )
    return build_tree.DraftTrees(
        chain, ids, *torch.zeros(2, places, nodes, dtype=torch.int32, device=device), masks
    )


def grows(batch: int, k: int, nodes: int, wide: bool, device: str, dtype: torch.dtype) -> None:
    logp, tokens, wanted = some_tree(batch, k, nodes, wide)
    index = torch.arange(batch).flip(0) + 1  # the place of each
    found = no_trees(batch + 2, k + 1, nodes + 3, device)
    names = torch.arange(99).flip(0)
    build_tree.build_tree(
        logp.to(device), 98 - tokens.to(device), names.to(device), nodes, index.to(device), found
    )
    for name, a, b in zip(wanted._fields, found, wanted, strict=True):
        own = a.cpu()[:, : b.shape[1]]
        assert own.dtype == b.dtype and torch.equal(own[index], b), name
        assert not own[[0, -1]].any() and not a[:, b.shape[1] :].any(), f"{name}: nobody's"


def walks(batch: int, k: int, nodes: int, device: str, dtype: torch.dtype) -> None:
    """The target says what a random path holds, up to where it disagrees."""
    places = batch + 3
    _, _, tree = some_tree(places, k, nodes, wide=True)
    generator = torch.Generator().manual_seed(nodes)
    index = torch.randperm(places, generator=generator)[:batch]
    ids = torch.cat([torch.zeros(batch, 1, dtype=torch.long), tree.nodes[index]], 1)
    tokens = torch.full((batch, nodes + 1), 100)
    for b in range(batch):
        for row in torch.randperm(nodes, generator=generator).tolist()[
            : nodes // 2
        ]:  # some parents agree with a child
            tokens[b, tree.parents[index[b], row]] = tree.nodes[index[b], row]
    tokens[0, 0], tokens[1, 0] = tree.chain[index[0], 0], 100
    first = torch.randint(0, 50, (batch,), generator=generator).int()
    ends = first + torch.randint(1, k + 3, (batch,), generator=generator).int()
    tops, broken = some(batch, nodes + 1), torch.arange(batch) % 3 == 1
    tops[broken, nodes // 2] = torch.inf
    results = []
    for run in (accept_tree.accept_tree, accept_tree.reference):
        state = [
            torch.ones(places, dtype=kind, device=device)
            for kind in (torch.int32, torch.int32, torch.int64)
        ]
        tokens_, tops_, ids_, *rest = (
            x.to(device) for x in (tokens, tops, ids, first, ends, index)
        )
        trees = build_tree.DraftTrees(*(x.to(device) for x in tree))
        results.append((*run(tokens_, tops_, ids_, trees, *rest, *state, k), *state))
    kept, _, path, flat, path_ids, packed = (x.cpu() for x in results[1][:6])
    assert torch.equal(ids.flatten()[flat].view(path.shape), path_ids)
    said, (told, bad, agrees, taken) = packed[:, : k + 1], packed[:, k + 1 :].T
    assert torch.equal(tokens.flatten()[flat].view(path.shape), said)
    assert torch.equal(told, kept.long()) and torch.equal(bad, broken.long())
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), i
    for b in range(batch):  # the rule, spelled out
        row, length = 0, 0
        while length < ends[b] - 1 - first[b]:
            children = [n + 1 for n in range(nodes) if tree.parents[index[b], n] == row]
            below = [child for child in children if ids[b, child] == tokens[b, row]]
            if not below:
                break
            row, length = below[0], length + 1
            assert path[b, length] == row
        assert kept[b] == length and results[1][1][b] == tokens[b, row]
        assert taken[b] == sum(1 << row for row in path[b, : length + 1].tolist())
        pairs = zip(tree.chain[index[b]].tolist(), said[b, : length + 1].tolist(), strict=False)
        assert agrees[b] == len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert kept.max() > 1 and len(set(agrees.tolist())) > 1


def moves(batch: int, layers: int, width: int, device: str, dtype: torch.dtype) -> None:
    page, pages, k = 4, 6, 5
    tables = (
        torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
        .view(batch, pages)
        .int()
    )
    generator = torch.Generator().manual_seed(width)
    path = torch.stack(
        [torch.randperm(15, generator=generator)[:k].sort().values + 1 for _ in range(batch)]
    )
    path = torch.cat([torch.zeros(batch, 1, dtype=torch.long), path], 1)
    first = torch.randint(0, 8, (batch,), generator=generator).int()
    kept = torch.randint(0, k + 1, (batch,), generator=generator).int()
    kept[0] = k
    caches = [some(layers, batch * pages * page, width).to(device, dtype) for _ in range(2)]
    for run, cache in zip((compact_kv.compact_kv, compact_kv.reference), caches, strict=True):
        run(cache, *(x.to(device) for x in (first, kept, path, tables)), page)
    assert torch.equal(*caches)
    before = some(layers, batch * pages * page, width).to(device, dtype)

    def slot(position: int) -> int:
        return int(tables[0, position // page]) * page + position % page

    for depth, row in enumerate(path[0].tolist()):
        assert torch.equal(
            caches[0][:, slot(int(first[0]) + depth)], before[:, slot(int(first[0]) + row)]
        )


def finds(rows: int, size: int, count: int, device: str, dtype: torch.dtype) -> None:
    logits = (some(rows, size + 3) * 3).to(device, dtype)[:, :size]
    logits[0, size // 2 :] = logits[0, 0]  # equals: the first counts
    factor = torch.linspace(0.5, 1.5, rows, device=device)
    found, wanted = (
        run(logits, factor, count) for run in (candidates.candidates, candidates.reference)
    )
    first = (logits.float() * factor[:, None]).sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found[0], first[:, :count])
    near(found[1], wanted[1])
    near(found[2], wanted[2], 8)


def pairs_up(batch: int, k: int, rank: int, device: str, dtype: torch.dtype) -> None:
    rows, size = batch * k, 40
    logits = (some(rows, size) * 2).to(device)
    factor = torch.linspace(0.5, 1.5, rows, device=device)
    ids, values, totals = candidates.reference(logits, factor, 16)
    drawn = (some(n, rank, seed=i) / rank**0.5 for i, n in enumerate((rows, size, size)))
    here, before, after = (x.to(device, dtype) for x in drawn)
    given = ids, values, totals, factor, here, before, after * 3, k
    found, wanted = candidate_pairs.candidate_pairs(*given), candidate_pairs.reference(*given)
    near(found, wanted, 40)
    logp = (logits * factor[:, None]).log_softmax(-1).gather(1, ids)
    near(
        wanted[::k], logp[::k, None].expand(-1, 16, -1), 8
    )  # the first row of a block is not corrected
    assert (wanted[1] - wanted[1, 0]).abs().max() > 0.05 and (wanted.exp().sum(-1) < 1.0001).all()


def takes_trees(batch: int, nodes: int, device: str, dtype: torch.dtype) -> None:
    places, page, pages = batch + 2, 4, 20
    _, _, tree = some_tree(places, 5, nodes, wide=False)
    generator = torch.Generator().manual_seed(batch)
    tables = torch.randperm(places * pages, generator=generator).view(places, pages).int()
    lengths = torch.randint(0, pages * page - nodes - 1, (places,), generator=generator).int()
    ends = lengths + torch.randint(1, 7, (places,), generator=generator).int()
    newest, index = torch.arange(places), torch.randperm(places, generator=generator)[:batch]
    given = [
        x.to(device) for x in (tables, lengths, ends, newest, tree.nodes, tree.depths, tree.masks)
    ]
    for width in (nodes + 1, nodes // 2):  # a smaller tree is the beginning of a larger one
        found, wanted = (
            run(index.to(device), width, page, *given)
            for run in (gather_rows.gather_rows, gather_rows.reference)
        )
        for name, a, b in zip(found._fields, found, wanted, strict=True):
            assert (a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name
        stored = found.slots[found.slots >= 0]
        assert len(stored) == len(stored.unique())
        assert found.positions.view(batch, width)[:, 0].equal(found.first.long())


def attends_trees(
    heads: int, kv_heads: int, nodes: int, device: str, dtype: torch.dtype, **switches: Any
) -> None:
    """A row of a tree gives what the last row of its path gives in a chain."""
    batch, page, d, k = 2, 16, 16, 5
    _, _, tree = some_tree(batch, k, nodes, wide=True)
    first, rows = torch.tensor([37, 3]).int(), nodes + 1
    pages = 8
    tables = torch.arange(batch * pages).view(batch, pages).int()
    caches = some(2, batch * pages * page, kv_heads, d)
    query = some(batch * rows, heads, d)
    depths = torch.cat([torch.zeros(batch, 1).int(), tree.depths], 1)
    positions, masks = (first[:, None] + depths).flatten().long(), tree.masks.flatten()
    starts, counts = torch.tensor([0, rows]).int(), torch.tensor([rows, rows]).int()
    args = [x.to(device, dtype) for x in (query, caches[0], caches[1])]
    ints = [x.to(device) for x in (starts, counts, first)]
    more = {"masks": masks.to(device), "positions": positions.to(device), **switches}
    given = (*args, tables.to(device), page, *ints, rows, d**-0.5)
    wanted = paged_attention.reference(*given, **more)
    for splits in (None, 1, 3):
        near(paged_attention.paged_attention(*given, **more, splits=splits), wanted, 4)
    b, row = 1, nodes  # the last node, as a chain of its own
    path = [i for i in range(rows) if tree.masks[b, row] >> i & 1]
    keys = [x[b * pages * page :] for x in args[1:]]
    moved = [torch.cat([x[: first[b]], x[first[b] + torch.tensor(path)]]) for x in keys]
    one = torch.tensor([0]).int().to(device)
    alone = paged_attention.reference(
        args[0][b * rows + row][None],
        *moved,
        torch.arange(4, device=device)[None],
        page,
        one,
        one + 1,
        one + int(first[b]) + len(path) - 1,
        1,
        d**-0.5,
        **switches,
    )
    near(wanted[b * rows + row][None], alone, 4)


def attends_both_ways(both: int, device: str, dtype: torch.dtype) -> None:
    """The last rows of a request see each other; without their future keys the others do not change."""
    page, d, counts, first = 16, 16, torch.tensor([7, 3]).int(), torch.tensor([20, 0]).int()
    tables, starts = torch.arange(6).view(2, 3).int(), torch.tensor([0, 7]).int()
    query, caches = some(10, 4, d), some(2, 6 * page, 2, d)
    args = [x.to(device, dtype) for x in (query, caches[0], caches[1])]
    ints = [x.to(device) for x in (starts, counts, first)]
    given = (*args, tables.to(device), page, *ints, 7, d**-0.5)
    wanted, causal = (paged_attention.reference(*given, both=n) for n in (both, 0))
    for splits in (None, 1, 3):
        near(paged_attention.paged_attention(*given, both=both, splits=splits), wanted, 4)
    near(wanted[: 7 - both], causal[: 7 - both])
    near(wanted[6], causal[6])
    assert not torch.allclose(wanted[7 - both].float(), causal[7 - both].float(), atol=1e-2)


CASES = {
    "grow": partial(grows, 3, 7, 32, True),
    "grow, independent": partial(grows, 5, 4, 31, False),
    "grow, chain alone": partial(grows, 3, 7, 0, True),
    "grow, the largest": partial(grows, 1, 11, 62, True),
    "walk": partial(walks, 9, 7, 32),
    "walk, the largest": partial(walks, 4, 5, 62),
    "move": partial(moves, 5, 3, 40),
    "move, wide": partial(moves, 2, 2, 300),
    "candidates": partial(finds, 7, 5000, 16),
    "candidates, few": partial(finds, 3, 20, 4),
    "pairs": partial(pairs_up, 3, 5, 64),
    "pairs, odd rank": partial(pairs_up, 2, 7, 24),
    "take, trees": partial(takes_trees, 6, 32),
    "attention, trees": partial(attends_trees, 6, 2, 32),
    "attention, trees in a window": partial(attends_trees, 4, 4, 20, window=21),
    "attention, both ways": partial(attends_both_ways, 4),
}

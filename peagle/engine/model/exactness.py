"""Exact mode: speculation cannot change a token, not even at a near tie in bfloat16.

A pass over K+1 rows is not bit-equal to K+1 passes over one row: kernels sum in another order, and where two tokens are
almost equally likely the last bit decides. In exact mode, with or without drafts, every request has its passes to
itself, filled up to a multiple of a few rows; attention (attention.py) shows each row a number of keys that depends on
its position alone. Then a row's bits depend neither on its place in a block nor on its neighbors. The smallest
multiple for which that holds, bit by bit, is found by trying.
"""

import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.verifier import Verifier, cache_shapes
from peagle.kernels.row_pass import RowPass
from peagle.target import Target

BLOCKS = (8, 16)  # the verify passes of K = 7 and K = 15: what is probed is what is promised
CONTEXTS = (
    11,
    58,
    185,
    250,
)  # probed behind so many tokens: blocks within a page, and over the end of one
MULTIPLES = (
    2,
    4,
    8,
    16,
)  # never 1: a single row takes a road of its own through most matrix libraries


def filled(ids: Tensor, rows: RowPass, multiple: int) -> tuple[Tensor, RowPass]:
    """Rows of nobody behind the others, up to a multiple."""
    more = -len(ids) % multiple
    if not more:
        return ids, rows
    ids, positions = (torch.cat([x, x.new_zeros(more)]) for x in (ids, rows.positions))
    slots = torch.cat([rows.kv_slots, rows.kv_slots.new_full((more,), -1)])
    wide = RowPass(
        positions,
        slots,
        rows.page_tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        rows.max_rows,
        rows.page_size,
    )
    assert rows.tree_masks is None, "exact mode verifies chains"
    return ids, wide


def exact_multiple(verifier: Verifier, target: Target, page: int, k: int = 0) -> int | None:
    """None: there is none, as for mixtures of experts, where a row's neighbors change its bits."""
    sizes = (*BLOCKS, k + 1) if k + 1 > max(BLOCKS) else BLOCKS
    return next(
        (
            m
            for m in MULTIPLES
            if all(_alike(verifier, target, page, n, sizes, m) for n in CONTEXTS)
        ),
        None,
    )


@torch.inference_mode()
def _alike(
    verifier: Verifier,
    target: Target,
    page: int,
    context: int,
    sizes: tuple[int, ...],
    multiple: int,
) -> bool:
    """Are a row's logits the same in the middle of a block and as the first row of its own pass?"""
    most = context + max(sizes) + multiple
    if most > target.context:
        return True
    pages, device = -(-most // page), target.device
    memory = KVCache(cache_shapes(target), pages, page, device)
    tables = torch.arange(pages, dtype=torch.int32, device=device)[None]
    ids = torch.randint(target.vocab_size, (most,), generator=torch.Generator().manual_seed(0)).to(
        device
    )

    def logits(first: int, count: int, to: int) -> Tensor:
        at = torch.arange(first, first + count, device=device)
        start, rows_of_it, behind = (
            torch.tensor([n], dtype=torch.int32, device=device) for n in (0, count, first)
        )
        rows = RowPass(at, at, tables, start, rows_of_it, behind, count, page)
        return verifier.forward(*filled(ids[first : first + count], rows, to), memory)[0][:count]

    logits(0, context, 1)
    blocks = [logits(context, size, multiple) for size in sizes]
    singles = [logits(context + i, 1, multiple)[0] for i in range(min(sizes))]
    return all(
        torch.equal(single, block[i]) for i, single in enumerate(singles) for block in blocks
    )

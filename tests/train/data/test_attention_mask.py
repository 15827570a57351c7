"""The attention mask of training equals the causal pattern of inference, dense and with flex."""

import pytest
import torch

from peagle.train.data.attention_mask import (
    BLOCK_SIZE,
    RowSet,
    attention,
    block_mask,
    classify_blocks,
    context_mask,
    dense_mask,
)
from tests.support.train.training import some_batch, some_pack

LONG = ((300, 40), (1, 0), (200, 100), (131, 3), (2, 0), (90, 10))


def rows_of(
    seed: int = 0, bidirectional: bool = False, k: int = 6, device: str = "cpu"
) -> tuple[RowSet, RowSet]:
    """(queries, keys): the chains of a pack against its context and themselves."""
    batch = some_batch(some_pack(LONG, seed), k, device=device, bidirectional=bidirectional)
    chains = batch.segments[0].levels[0].rows
    return chains, batch.context + chains


def test_worked_example():
    nothing, anchor, depth = (
        torch.zeros(5).int(),
        torch.tensor([0, 1, 2, 1, 1]),
        torch.tensor([0, 0, 0, 1, 2]),
    )
    rows = RowSet(nothing, nothing, nothing, anchor, depth, depth)
    assert dense_mask(rows, rows).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_a_bidirectional_block():
    """Mask rows also see later rows of their own chain; nothing else changes."""
    q, k = rows_of()
    both, _ = rows_of(bidirectional=True)
    more = dense_mask(both, k) & ~dense_mask(q, k)
    later = (
        (k.anchor == q.anchor[:, None]) & (k.depth > q.depth[:, None]) & (k.doc == q.doc[:, None])
    )
    assert (
        torch.equal(more, later)
        and later.any()
        and not (dense_mask(q, k) & ~dense_mask(both, k)).any()
    )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_block_lists_cover_every_visible_pair(seed: int, bidirectional: bool):
    q, k = rows_of(seed, bidirectional)
    dense = dense_mask(q, k)
    blocks = dense.view(
        len(q) // BLOCK_SIZE, BLOCK_SIZE, len(k) // BLOCK_SIZE, BLOCK_SIZE
    ).transpose(1, 2)
    some, full = classify_blocks(q, k)
    assert not (blocks.any(-1).any(-1) & ~some).any(), "a block with a visible pair is left out"
    assert not (full & ~blocks.all(-1).all(-1)).any(), "a block marked as full has a hidden pair"
    assert full.any() and (~some).float().mean() > 0.3, "too few blocks are left out"


def test_every_row_sees_itself():
    q, _ = rows_of()
    assert dense_mask(q, q).diagonal().all()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_flex_equals_dense_on_cpu(bidirectional: bool):
    q, k = rows_of(0, bidirectional)
    query, key, value = (
        torch.randn(n, heads, 16) for n, heads in ((len(q), 4), (len(k), 2), (len(k), 2))
    )
    dense = attention(query, key, value, dense_mask(q, k))
    torch.testing.assert_close(
        attention(query, key, value, block_mask(q, k)), dense, rtol=1e-5, atol=1e-5
    )


def test_context_mask_equals_the_dense_mask():
    batch = some_batch(some_pack(LONG), 6)
    query = torch.randn(len(batch.ids), 4, 16)
    dense = attention(query, query, query, dense_mask(batch.context, batch.context))
    torch.testing.assert_close(
        attention(query, query, query, context_mask(batch.context)), dense, rtol=1e-5, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize("bidirectional", [False, True])
def test_flex_equals_dense_on_gpu(bidirectional: bool):
    """Forward and backward, compiled: only then does the list of blocks have an effect."""
    torch.backends.cuda.matmul.allow_tf32 = False
    q, k = rows_of(0, bidirectional, device="cuda")
    shapes = ((len(q), 9), (len(k), 3), (len(k), 3))
    inputs = [torch.randn(n, heads, 64, device="cuda", requires_grad=True) for n, heads in shapes]
    compiled = torch.compile(attention)
    results = []
    for mask, run in ((dense_mask(q, k), attention), (block_mask(q, k), compiled)):
        out = run(*inputs, mask)
        gradients = torch.autograd.grad(out.square().sum(), inputs)
        results.append([out, *gradients])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.detach().abs().max())
        )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("window", [64, 150])
def test_a_window(window: int, bidirectional: bool):
    """Dense, flex and the lists of blocks agree; the chain is always visible."""
    layout = {"bidirectional": bidirectional, "window": window}
    batch = some_batch(some_pack(LONG), 6, **layout)
    plain = some_batch(some_pack(LONG), 6, bidirectional=bidirectional)
    q = batch.segments[0].levels[0].rows
    k = batch.context + q
    plain_q = plain.segments[0].levels[0].rows
    distance = (q.anchor + q.depth)[:, None] - (k.anchor + k.depth)
    expected = dense_mask(plain_q, plain.context + plain_q) & (distance < window)
    assert torch.equal(dense_mask(q, k), expected)
    assert (distance[dense_mask(plain_q, plain.context + plain_q)] >= window).any()
    query, key, value = (
        torch.randn(n, heads, 16) for n, heads in ((len(q), 4), (len(k), 2), (len(k), 2))
    )
    dense = attention(query, key, value, dense_mask(q, k))
    flex = attention(query, key, value, block_mask(q, k))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)
    blocks = expected.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE)).transpose(1, 2)
    some, full = classify_blocks(q, k)
    assert not (blocks.any(-1).any(-1) & ~some).any()
    assert not (full & ~blocks.all(-1).all(-1)).any()


def test_the_target_has_no_window():
    batch = some_batch(some_pack(LONG), 6, window=64, flex=True)
    plain = some_batch(some_pack(LONG), 6, flex=True)
    assert torch.equal(batch.context.unwindowed.first_visible, plain.context.first_visible)
    assert torch.equal(batch.block_lists.full.counts, plain.block_lists.full.counts)
    assert batch.drafter_block_lists.full.counts.sum() < plain.drafter_block_lists.full.counts.sum()


def test_rows_of_a_refinement_see_their_block_only():
    """A row sees its anchor and its chain up to itself, as in decoding."""
    chains, k = rows_of(bidirectional=True)
    q = chains.in_blocks
    same_chain = (k.anchor == q.anchor[:, None]) & (k.doc == q.doc[:, None])
    expected = same_chain & (k.depth <= q.depth[:, None])
    assert torch.equal(dense_mask(q, k), expected)
    padding = q.doc == q.doc.max()  # A row of padding sees itself only.
    assert torch.equal(expected.sum(1), torch.where(padding, 1, q.depth + 1))
    query, key, value = (
        torch.randn(n, heads, 16) for n, heads in ((len(q), 4), (len(k), 2), (len(k), 2))
    )
    dense = attention(query, key, value, expected)
    torch.testing.assert_close(
        attention(query, key, value, block_mask(q, k)), dense, rtol=1e-5, atol=1e-5
    )
    batch = some_batch(some_pack(LONG), 6, flex=True, refinement=True)
    lists = batch.segments[0].levels[0].refinement_lists
    blocks = expected.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE)).transpose(1, 2)
    needed = blocks.any(-1).any(-1)
    some, full = classify_blocks(q, k)
    assert not (needed & ~some).any() and not full.any()
    assert lists.partial.counts.sum() == some.sum() < 0.3 * some.numel()

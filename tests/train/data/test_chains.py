"""COD sampling: chains are nested and inside one answer; a batch has every row exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.train.data.attention_mask import BLOCK_SIZE, dense_mask
from peagle.train.data.chains import (
    Chains,
    full_chains,
    max_chain_lengths,
    max_chain_rows,
    sample_chains,
)
from peagle.train.data.pack import Batch, BatchLayout, PackedDocuments, build_batch, pack_sequences

# One list for each document.
masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=6)


def packed_of(answers: list[list[bool]], tokens: int = 0) -> PackedDocuments:
    rng = np.random.default_rng(0)
    return pack_sequences(
        [(rng.integers(6, 96, len(answer)), np.array(answer)) for answer in answers], tokens
    )


def span(length: int, *spans: tuple[int, int]) -> list[bool]:
    return [any(start <= i < end for start, end in spans) for i in range(length)]


def naive_length(packed: PackedDocuments, p: int) -> int:
    """Count rows one by one while token p + 2 is part of the same document and of an answer."""
    count = 0
    while (
        p + 2 < len(packed.ids) and packed.doc[p + 2] == packed.doc[p] and packed.answer_mask[p + 2]
    ):
        count, p = count + 1, p + 1
    return count


def pairs(chains: Chains) -> list[tuple[int, int]]:
    return list(zip(chains.anchor.tolist(), chains.depth.tolist(), strict=True))


@given(masks)
def test_max_chain_lengths_count_supervised_rows(answers):
    packed = packed_of(answers)
    assert packed.max_chain_lengths.tolist() == [
        naive_length(packed, p) for p in range(len(packed.ids))
    ]


@settings(max_examples=150)
@given(masks, st.integers(1, 9), st.floats(0.2, 1.0), st.integers(0, 20), st.integers(0, 99))
def test_chains_are_nested_and_inside_their_answer(answers, k, keep, cap, seed):
    packed = packed_of(answers)
    chains = sample_chains(packed.max_chain_lengths, k, keep, np.random.default_rng(seed), cap)
    kept = set(pairs(chains))
    assert len(kept) == len(chains) and pairs(chains) == sorted(kept), (
        "rows must be unique and sorted by anchor, then depth"
    )
    for anchor, depth in kept:
        assert anchor >= 0 and 1 <= depth < k
        assert depth == 1 or (anchor, depth - 1) in kept, "a row without its parent"
        tokens = range(anchor + 2, anchor + depth + 3)  # that the chain predicts, with depth 0
        assert all(packed.answer_mask[i] and packed.doc[i] == packed.doc[anchor] for i in tokens)
        assert packed.doc[anchor] < len(answers), "padding has a chain"
    anchors = np.count_nonzero(packed.max_chain_lengths)
    assert len(chains) <= max_chain_rows(min(cap, anchors) if cap else anchors, k, keep)
    if cap:
        assert len(np.unique(chains.anchor)) <= cap


@given(st.integers(1, 500), st.integers(1, 12), st.floats(0.1, 1.0), st.integers(0, 99))
def test_depth_k_keeps_n_r_to_the_k(n, k, keep, seed):
    chains = sample_chains(np.full(n, k), k, keep, np.random.default_rng(seed))
    for depth in range(1, k):
        assert abs((chains.depth == depth).sum() - n * keep**depth) <= 1
    assert len(chains) == max_chain_rows(n, k, keep)


def test_capped_anchors_are_chosen_at_random():
    """Anchors are not contiguous, and differ by seed; the cap holds for all depths."""
    room = np.full(1000, 8)
    chosen = [
        np.unique(sample_chains(room, 8, 1.0, np.random.default_rng(s), 100).anchor)
        for s in range(2)
    ]
    assert [len(c) for c in chosen] == [100, 100] and chosen[0].tolist() != chosen[1].tolist()
    assert all(c[0] < 100 and c[-1] > 900 and np.diff(c).max() > 1 for c in chosen)


@pytest.mark.parametrize("seed", range(3))
def test_sampling_is_reproducible_with_a_seed(seed: int):
    room = packed_of([span(60, (5, 60))]).max_chain_lengths
    first, second = (
        pairs(sample_chains(room, 6, 0.7, np.random.default_rng(seed))) for _ in range(2)
    )
    assert first == second != pairs(sample_chains(room, 6, 0.7, np.random.default_rng(seed + 10)))


EDGES = {
    "answer from position 0": ([span(5, (0, 5))], [3, 2, 1, 0, 0]),
    "one-token document": ([[True], span(4, (1, 4))], [0, 2, 1, 0, 0]),
    "two-token document": ([[True, True], [True, True, True]], [0, 0, 1, 0, 0]),
    "no answer": ([span(5), span(3)], [0] * 8),
    "the answer ends its document": ([span(4, (2, 4)), span(4, (3, 4))], [2, 1, 0, 0, 0, 1, 0, 0]),
    "a next document all answer": ([span(3, (2, 3)), span(4, (0, 4))], [1, 0, 0, 2, 1, 0, 0]),
    "two answers in a document": ([span(9, (2, 4), (6, 9))], [2, 1, 0, 0, 3, 2, 1, 0, 0]),
}


@pytest.mark.parametrize("name", EDGES)
def test_edge_cases(name: str):
    answers, room = EDGES[name]
    packed = packed_of(answers)
    assert (
        packed.max_chain_lengths[: len(room)].tolist() == room
        and not packed.max_chain_lengths[len(room) :].any()
    )
    chains = sample_chains(packed.max_chain_lengths, 8, 1.0, np.random.default_rng(0))
    assert pairs(chains) == [(a, d) for a, count in enumerate(room) for d in range(1, count)]


def test_a_pack_without_padding():
    packed = packed_of([span(BLOCK_SIZE, (0, BLOCK_SIZE))])
    assert len(packed.ids) == BLOCK_SIZE and packed.max_chain_lengths[:3].tolist() == [
        126,
        125,
        124,
    ]
    assert max_chain_lengths(packed.doc, packed.answer_mask)[-2:].tolist() == [0, 0]


def rows(batch: Batch) -> list[tuple[int, int]]:
    """(anchor, depth) of every row except padding, by segment and level."""
    levels = [
        level.rows[: level.num_unpadded] for segment in batch.segments for level in segment.levels
    ]
    return [pair for r in levels for pair in zip(r.anchor.tolist(), r.depth.tolist(), strict=True)]


@settings(max_examples=60)
@given(masks, st.integers(1, 7), st.booleans(), st.sampled_from([1, 2, 3, 8]), st.integers(0, 99))
def test_segments_partition_the_chains(answers, k, by_depth, segments, seed):
    packed = packed_of(answers * 8)  # several blocks long
    chains = sample_chains(packed.max_chain_lengths, k, 0.8, np.random.default_rng(seed))
    batch = build_batch(packed, chains, BatchLayout(by_depth, segments))
    assert sorted(rows(batch)) == pairs(chains) and batch.num_supervised == len(
        chains
    ) + np.count_nonzero(packed.max_chain_lengths)
    size, seen = len(packed.ids), set()
    bounds = [size * s // segments for s in range(segments)]
    for segment in batch.segments:
        anchors = np.concatenate(
            [level.rows.anchor[: level.num_unpadded].numpy() for level in segment.levels]
        )
        (bucket,) = set(np.searchsorted(bounds, anchors + 1, "right").tolist())
        assert bucket not in seen and segment.context_length > anchors.max()
        assert segment.context_length % BLOCK_SIZE == 0 or segment.context_length == size
        seen.add(bucket)


@settings(max_examples=60)
@given(
    masks, st.integers(2, 7), st.booleans(), st.sampled_from([1, 4]), st.sampled_from([0, 40, 300])
)
def test_rows_of_a_level(answers, k, by_depth, segments, min_size):
    packed = packed_of(answers, tokens=200)
    chains = sample_chains(packed.max_chain_lengths, k, 0.9, np.random.default_rng(0))
    layout = BatchLayout(by_depth, segments, level_sizes=(min_size,) * k)
    batch = build_batch(packed, chains, layout)
    for segment in batch.segments:
        before = [(i, 0) for i in range(len(packed.ids))]
        for level in segment.levels:
            anchor, depth = (
                x[: level.num_unpadded].numpy() for x in (level.rows.anchor, level.rows.depth)
            )
            assert len(level.rows) % BLOCK_SIZE == 0 and len(level.rows) >= max(
                min_size, level.num_unpadded
            )
            assert (
                level.positions[: level.num_unpadded].tolist()
                == (packed.position[anchor] + depth).tolist()
            )
            assert (
                level.previous_ids[: level.num_unpadded].tolist()
                == packed.ids[anchor + depth + 1].tolist()
            )
            own = list(zip(anchor.tolist(), depth.tolist(), strict=True))
            if by_depth:
                assert [before[i] for i in level.parent[: level.num_unpadded]] == [
                    (a, d - 1) for a, d in own
                ]
                before = own
            sees = dense_mask(level.rows, batch.context + level.rows)[level.num_unpadded :, :]
            assert sees.sum(1).eq(1).all(), "a row of padding sees other rows"
            assert (level.rows.doc_start > level.rows.anchor)[level.num_unpadded :].all(), (
                "flex attention would let padding see its anchor"
            )


def test_the_batch_shifts_ids_by_one():
    packed = packed_of([span(7, (2, 7)), span(4, (2, 4))])
    batch = build_batch(packed, full_chains(np.array([0, 3]), 4))
    assert batch.next_ids[:-1].tolist() == packed.ids[1:].tolist() and batch.next_ids[-1] == 0
    assert batch.positions[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0]
    assert (
        batch.supervised.tolist()
        == np.flatnonzero(packed.max_chain_lengths).tolist()
        == [0, 1, 2, 3, 4, 7, 8]
    )
    assert rows(batch) == [(0, 1), (0, 2), (0, 3), (3, 1), (3, 2), (3, 3)]

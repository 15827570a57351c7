"""Forced acceptance: chains accept at the given rates, trees as a trained drafter would."""

from typing import Any

import pytest
import torch

from peagle.bench.random_models import random_pair
from peagle.bench.step_cost import PROFILE, build_engine, conditional_probabilities
from peagle.draft_shape import CANDIDATES_PER_DEPTH, DraftShape
from peagle.engine.kv.slots import empty_trees
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.sampling.forced_acceptance import (
    RANK_SHARES,
    ForcedAcceptance,
    draw_confidences,
    expected_length,
    rank_probabilities,
)
from peagle.kernels.slot_state import SlotBatch, SlotState
from peagle.kernels.triton.accept import accept
from peagle.kernels.triton.accept_tree import accept_tree
from peagle.kernels.triton.build_tree import build_tree

VOCAB = 4096
REQUESTS = 3000
RATES = conditional_probabilities(PROFILE)


def slot_state() -> tuple[SlotBatch, SlotState]:
    """Slots with room for every draft."""
    index = torch.arange(REQUESTS)
    counters = torch.zeros(4, REQUESTS, dtype=torch.int32)
    ends = torch.full_like(counters[0], 100)
    state: Any = SlotState(counters[0], counters[1], ends, counters[2], torch.zeros_like(index))
    return SlotBatch(index, counters[3], ends), state


def distinct_tokens(k: int) -> torch.Tensor:
    """Candidates [requests, K, M]; those of a row differ."""
    first = torch.randint(VOCAB, (REQUESTS, k, 1))
    step = torch.randint(1, VOCAB // CANDIDATES_PER_DEPTH, (REQUESTS, k, 1))
    return (first + step * torch.arange(CANDIDATES_PER_DEPTH)) % VOCAB


def accepted_counts(shape: DraftShape, rates: list[float]) -> list[AcceptedCounts]:
    """Draft and verify one tree for each request."""
    torch.manual_seed(0)
    index = torch.arange(REQUESTS)
    trees = empty_trees(REQUESTS, shape, torch.device("cpu"))
    forced = ForcedAcceptance(rates, trees, VOCAB)
    ids = distinct_tokens(shape.k)
    logp = forced.draw(ids, index)
    assert logp.is_contiguous(), "the kernel needs contiguous log-probabilities"
    build_tree(logp, ids, None, shape.nodes, index, trees)
    rows = torch.cat([torch.zeros(REQUESTS, 1, dtype=torch.long), trees.nodes], 1)
    tokens = torch.zeros_like(rows)
    forced.apply(tokens, rows, shape, index)
    top_logits = torch.zeros(rows.shape)
    path = accept_tree(tokens, top_logits, rows, trees, *slot_state(), shape.k)
    return [AcceptedCounts(*row) for row in path.packed[:, [-4, -2, -1]].tolist()]


def mean_length(counts: list[int]) -> float:
    return 1 + sum(counts) / len(counts)


def test_trees_accept_as_expected() -> None:
    """The counts for a smaller tree and for the chain are checked as well."""
    counts = accepted_counts(DraftShape(7, 31), RATES)
    tolerance = 4 * 2 / REQUESTS**0.5  # four standard errors
    expected = {nodes: expected_length(RATES, DraftShape(7, nodes)) for nodes in (15, 31)}
    assert 1 + sum(PROFILE) + 0.3 < expected[15] < expected[31] - 0.3
    assert mean_length([own.accepted for own in counts]) == pytest.approx(
        expected[31], abs=tolerance
    )
    assert mean_length([own.accepted_by_tree(15) for own in counts]) == pytest.approx(
        expected[15], abs=tolerance
    )
    assert mean_length([min(own.chain, 7) for own in counts]) == pytest.approx(
        1 + sum(PROFILE), abs=tolerance
    )


def test_trees_accept_nothing_beyond_the_profile() -> None:
    counts = accepted_counts(DraftShape(11, 31), RATES[:3])
    assert max(own.accepted for own in counts) == 3
    assert max(own.accepted for own in accepted_counts(DraftShape(7, 31), [0.0])) == 0


def test_a_drafter_that_is_always_right() -> None:
    counts = accepted_counts(DraftShape(7, 15), [1.0] * 7)
    assert {own.accepted for own in counts} == {own.chain for own in counts} == {7}


def test_chains_accept_at_the_given_rates() -> None:
    torch.manual_seed(0)
    trees = empty_trees(REQUESTS, DraftShape(7, 7), torch.device("cpu"))
    drafts = torch.randint(VOCAB, (REQUESTS, 8))
    tokens = torch.zeros_like(drafts)
    forced = ForcedAcceptance(RATES, trees, VOCAB)
    forced.apply(tokens, drafts, DraftShape(7, 7), torch.arange(REQUESTS))
    chain = accept(tokens, torch.zeros(drafts.shape), drafts[:, 1:], *slot_state())
    counts = chain.accepted_counts.tolist()
    assert mean_length(counts) == pytest.approx(1 + sum(PROFILE), abs=8 / REQUESTS**0.5)
    assert (tokens[:, -1] == 0).all(), "the token after the last draft must be that of the target"


def test_candidates_are_sorted_and_confidences_have_the_given_mean() -> None:
    confidences = draw_confidences([0.8, 0.4, 1.0, 0.0])
    assert confidences.mean(0).tolist() == pytest.approx([0.8, 0.4, 1.0, 0.0], abs=0.01)
    likely = rank_probabilities(confidences, torch.tensor(RANK_SHARES))
    assert likely.shape[-1] == CANDIDATES_PER_DEPTH
    assert (likely.diff(dim=-1) <= 0).all() and (likely.sum(-1) <= 1 + 1e-6).all()


def test_an_engine_accepts_as_expected() -> None:
    engine = build_engine(random_pair("tiny", "cpu", torch.float32), "p-eagle", 7, 8, 200, tree=15)
    engine.force_acceptance(RATES)
    torch.manual_seed(0)
    for _ in range(8):
        engine.add([1, 2, 3], max_tokens=150, ignore_eos=True)
    engine.drain()
    engine.check_integrity()
    expected = expected_length(RATES, DraftShape(7, 15))
    assert engine.metrics.acceptance_length == pytest.approx(expected, rel=0.1)
    assert set(engine.metrics.k_steps) == {15}
    engine.close()

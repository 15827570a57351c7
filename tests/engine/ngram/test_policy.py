"""The choice between n-gram drafts and those of the drafter, and how many are verified."""

import pytest

from peagle.draft_shape import MAX_NGRAM, NO_DRAFT, DraftShape
from peagle.engine.ngram.acceptance import NgramAcceptance, NgramRecord, expected_tokens
from peagle.engine.ngram.ngram_draft import NgramDraft
from peagle.engine.ngram.ngram_step import NgramStep
from peagle.engine.ngram.policy import DEFAULT_MIN_MATCH, NgramPolicy
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.candidates import candidate_shapes
from peagle.engine.policy.draft_policy import FixedPolicy

DRAFTS = list(range(15))
NEVER = MAX_NGRAM + 1


def seconds(k: int) -> float:
    """Costs of a CPU: little up to eight rows, then proportional."""
    return 0.02 + 0.001 * k + 0.0015 * max(0, k - 7)


def policy_with_acceptance(accepted: int) -> AdaptivePolicy:
    """A policy that saw chains of the drafter with `accepted` drafts in every step."""
    policy = AdaptivePolicy(candidate_shapes(7))
    for _ in range(100):
        shape = policy.choose(1).shape
        cost = seconds(shape.k) + 0.001 * shape.k
        policy.observe(1, shape, cost, [AcceptedCounts(*[min(accepted, shape.k)] * 2)])
    return policy


def policy_after(
    outcomes: list[int], match_length: int = 8, accepted: int = 3
) -> tuple[NgramPolicy, NgramRecord]:
    """A policy that saw n-gram drafts; `outcomes`: the accepted drafts of each step."""
    policy = NgramPolicy(policy_with_acceptance(accepted), 15, has_drafter=True)
    record = NgramRecord()
    for agreeing in outcomes:
        emitted = [*DRAFTS[:agreeing], 99][:15]
        draft = NgramDraft(match_length, DRAFTS, used=True)
        policy.observe_drafts(NgramStep([record], [draft], [7], True), [emitted])
    for k in policy.lengths:
        policy.observe(1, k, seconds(k))
    return policy, record


def test_repeated_text_gets_long_ngram_chains() -> None:
    policy, record = policy_after([15] * 10)
    [min_match] = policy.min_matches(1, [record])
    assert min_match <= MAX_NGRAM
    choice = policy.choose(1, [(record, NgramDraft(8, DRAFTS, True))], [])
    assert choice.shape == DraftShape(15, 15)


def test_rejected_ngrams_are_not_used() -> None:
    policy, record = policy_after([0] * 10)
    assert policy.min_matches(1, [record]) == [NEVER]
    fresh = NgramRecord()  # Another request learns from the same failures.
    assert policy.min_matches(1, [fresh]) == [NEVER]


def test_a_good_drafter_is_preferred_to_mediocre_ngrams() -> None:
    policy, record = policy_after([3, 2, 4, 3] * 5, accepted=7)
    assert policy.min_matches(1, [record]) == [NEVER]


def test_a_request_that_stops_repeating_itself_returns_to_the_drafter() -> None:
    policy, record = policy_after([15] * 10)
    other = NgramRecord()
    for _ in range(8):
        draft = NgramDraft(8, DRAFTS, used=True)
        policy.observe_drafts(NgramStep([record], [draft], [7], True), [[99]])
    assert policy.min_matches(1, [record])[0] == NEVER
    policy, _ = policy_after([15] * 10)
    assert policy.min_matches(1, [other])[0] <= MAX_NGRAM


def test_expensive_rows_shorten_chains() -> None:
    policy, record = policy_after([15] * 10)
    for k in policy.lengths:
        for _ in range(20):
            policy.observe(8, k, 0.02 + 0.02 * k)
    drafted = [7] * 7  # Seven of eight requests have drafts of the drafter.
    choice = policy.choose(8, [(record, NgramDraft(8, DRAFTS, True))], drafted)
    assert choice.shape.k < 5


def test_costs_depend_on_the_batch() -> None:
    """Mixed steps, with one n-gram draft of eight requests, are not measured separately."""
    policy, record = policy_after([15] * 10)
    for k in (0, 1, 3, 7):
        for _ in range(3):
            counts = [AcceptedCounts(0, 0)] * 8
            policy.drafter_policy.observe(8, DraftShape(k, k), 0.01 + 0.006 * k, counts)
    policy.observe_no_draft(8, 0.01)
    draft = NgramDraft(8, DRAFTS, True)
    assert policy.choose(8, [(record, draft)], [0] * 7).shape == NO_DRAFT
    assert policy.choose(1, [(record, draft)], []).shape == DraftShape(15, 15)


def test_old_costs_are_estimated_again() -> None:
    policy, _ = policy_after([15] * 10)
    assert policy.costs.sample_count(1, 11)
    for _ in range(200):
        policy.observe(1, 15, seconds(15))
    assert not policy.costs.sample_count(1, 11)
    assert policy.costs.seconds(1, 11) == pytest.approx(
        seconds(0) + (seconds(15) - seconds(0)) * 11 / 15
    )


def test_fixed_chains_keep_their_length() -> None:
    policy = NgramPolicy(FixedPolicy(DraftShape(5, 5)), 5, has_drafter=True)
    assert policy.min_matches(2, [NgramRecord()] * 2) == [DEFAULT_MIN_MATCH] * 2
    draft = (NgramRecord(), NgramDraft(8, DRAFTS[:5], True))
    assert policy.choose(1, [draft], []).shape == DraftShape(5, 5)
    ngram_only = NgramPolicy(FixedPolicy(DraftShape(0, 0)), 5, has_drafter=False)
    assert ngram_only.min_matches(1, [NgramRecord()]) == [0]


def test_undecided_drafts_are_not_evidence() -> None:
    acceptance = NgramAcceptance()
    record = NgramRecord()
    acceptance.observe(record, 8, DRAFTS, DRAFTS[:2])  # A chain of one draft gives two tokens.
    assert record.later.accepted == 1 and 0.5 < record.later.baseline < 1  # One draft was tried.
    acceptance.observe(record, 0, DRAFTS, [99])  # Nothing was proposed.
    assert record.first.accepted == 1
    first, later = acceptance.rates(record, 8)
    assert expected_tokens((first, later), 15) > expected_tokens((first, later), 7) > 1


def test_the_share_of_the_drafter_in_a_mixed_step() -> None:
    ngram = NgramDraft(8, DRAFTS, used=True)
    step = NgramStep([NgramRecord()] * 3, [ngram, None, None], [7, 3, 5], has_drafter=True)
    counts = [AcceptedCounts(9, 9), AcceptedCounts(3, 3), None]  # The third request has ended.
    assert step.draft_counts == [15, 3, 5]
    assert step.drafter_counts(15, counts) == (3, [AcceptedCounts(3, 3)])
    assert not step.is_pure

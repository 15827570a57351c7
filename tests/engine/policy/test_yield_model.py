"""Expected tokens per step: acceptance of chains by position, and the gain of trees."""

import pytest

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.policy.accepted import AcceptedCounts, accepted_counts
from peagle.engine.policy.yield_model import PRIOR_TREE_GAIN, ChainAcceptance, YieldModel
from tests.support.engine.simulated import chain, path

TREE = DraftShape(7, 16)
LARGER = DraftShape(7, 32)
SHAPES = (NO_DRAFT, chain(3), chain(7), TREE, LARGER)


def observe(
    model: YieldModel,
    steps: int,
    shape: DraftShape,
    accepted: int,
    by_chain: int = 0,
    by_tree: int = 0,
) -> None:
    """`by_chain`, `by_tree`: what the chain and the smaller tree would have accepted."""
    sizes = [(shape.nodes, accepted)]
    if shape == LARGER:
        sizes = [(TREE.nodes, by_tree), (LARGER.nodes, accepted)]
    counts = accepted_counts(accepted, () if shape.is_chain else (by_chain, path(sizes)))
    for _ in range(steps):
        model.observe(1, shape, [counts])


def test_evidence_of_a_tree_about_other_shapes() -> None:
    counts = AcceptedCounts(accepted=4, chain=2, path=sum(1 << row for row in (0, 5, 6, 17, 24)))
    sizes = (0, 5, 6, 16, 17, 23, 24, 62)
    assert [counts.accepted_by_tree(nodes) for nodes in sizes] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert counts.chain_trials(7) == 3 and counts.chain_trials(2) == 2
    assert AcceptedCounts(accepted=4, chain=5).chain_trials(7) == 5, "the sixth draft was not tried"
    assert accepted_counts(3, ()).chain_trials(7) == 4
    assert accepted_counts(3, ()).chain_trials(3) == 3


def test_without_speculation_nothing_is_learned_about_acceptance() -> None:
    acceptance = ChainAcceptance(7)
    for _ in range(100):
        acceptance.observe(1, 7, [AcceptedCounts(3, 3)])
    before = acceptance.expected_tokens()
    assert before[3] > 3.9 and before[7] < 4.2
    for _ in range(500):
        acceptance.observe(1, 0, [AcceptedCounts(0, 0)])
    assert acceptance.expected_tokens()[1] == pytest.approx(before[1])
    for _ in range(4):  # Old evidence has little weight by now.
        acceptance.observe(1, 1, [AcceptedCounts(0, 0)])
    assert acceptance.expected_tokens()[1] < 1.4


def test_untried_trees_have_optimistic_estimates() -> None:
    model = YieldModel(SHAPES)
    observe(model, 100, chain(7), 2)
    tokens = model.expected_tokens()
    assert tokens[chain(7)] == pytest.approx(3, rel=0.05) and tokens[NO_DRAFT] == 1
    assert tokens[TREE] >= 1 + 0.95 * PRIOR_TREE_GAIN * 2 and tokens[LARGER] >= tokens[TREE]


def test_a_step_of_a_tree_is_evidence_for_smaller_shapes() -> None:
    model = YieldModel(SHAPES)
    observe(model, 1000, LARGER, 5, by_chain=2, by_tree=4)
    tokens = [model.expected_tokens()[shape] for shape in SHAPES]
    assert tokens == pytest.approx([1, 3, 3, 5, 6], rel=0.02)


def test_a_tree_is_no_evidence_about_later_drafts_of_a_chain() -> None:
    """A tree that accepts two drafts decides only three drafts of a chain."""
    model = YieldModel(SHAPES)
    observe(model, 200, chain(7), 7)
    observe(model, 400, LARGER, 2, by_chain=3, by_tree=2)
    tokens = model.expected_tokens()
    assert tokens[chain(7)] > 6.5 and tokens[chain(3)] == pytest.approx(4, rel=0.01)
    assert tokens[LARGER] == pytest.approx(3, rel=0.1)


def test_estimates_of_other_shapes_change_with_the_text() -> None:
    """If acceptance doubles for the shape that runs, it is expected to double for others."""
    model = YieldModel(SHAPES)
    observe(model, 500, TREE, 2, by_chain=1)
    observe(model, 60, TREE, 4, by_chain=2)
    assert model.expected_tokens()[chain(7)] == pytest.approx(3, rel=0.05)
    observe(model, 100, chain(7), 1)
    assert model.expected_tokens()[TREE] == pytest.approx(3, rel=0.1)


def test_less_evidence_gives_higher_estimates() -> None:
    """Of two trees with equal acceptance, the one with less evidence has the higher estimate."""
    frequent = YieldModel(SHAPES)
    rare = YieldModel(SHAPES)
    observe(frequent, 1000, LARGER, 2, by_chain=2, by_tree=2)
    observe(rare, 5, LARGER, 2, by_chain=2, by_tree=2)
    for model in (frequent, rare):
        observe(model, 300, chain(7), 2)
    assert frequent.expected_tokens()[LARGER] == pytest.approx(
        frequent.expected_tokens()[chain(7)], rel=0.02
    )
    assert (
        rare.expected_tokens()[LARGER]
        > 1.03 * rare.expected_tokens()[TREE]
        > 1.06 * frequent.expected_tokens()[TREE]
    )


def test_the_gain_recovers_after_text_without_accepted_chains() -> None:
    model = YieldModel(SHAPES)
    observe(model, 3000, TREE, 1)
    observe(model, 300, TREE, 3, by_chain=2)
    assert model.expected_tokens()[TREE] == pytest.approx(4, rel=0.1)


def test_estimates_stay_finite_after_long_bad_text() -> None:
    model = YieldModel(SHAPES)
    observe(model, 200_000, chain(1), 0)
    assert model.expected_tokens()[LARGER] == pytest.approx(1)
    observe(model, 100, chain(7), 3)
    assert model.expected_tokens()[LARGER] > 4


def test_nothing_is_accepted_beyond_the_depth() -> None:
    model = YieldModel(SHAPES)
    observe(model, 200, chain(3), 3)
    observe(model, 200, LARGER, 7, by_chain=2, by_tree=5)
    assert all(tokens <= shape.k + 1 for shape, tokens in model.expected_tokens().items())


def test_draft_confidence_replaces_recent_acceptance() -> None:
    """Draft confidence replaces the recent acceptance of chains; trees keep their gain."""
    model = YieldModel((NO_DRAFT, chain(3), chain(7), LARGER))
    observe(model, 1000, LARGER, 3, by_chain=2)
    tokens = model.expected_tokens([0.5] * 7)
    assert tokens[chain(3)] == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert tokens[LARGER] == pytest.approx(1 + 1.5 * (tokens[chain(7)] - 1), rel=0.02)
    assert YieldModel(SHAPES[:3]).expected_tokens([0.5, 0.4])[chain(7)] < 1 + 0.5 + 0.2 + 0.2 / 0.6


def test_other_trees_do_not_change_gains() -> None:
    model = YieldModel(SHAPES)
    before = {tree: gain.value for tree, gain in model.gains.items()}
    model.observe(1, DraftShape(5, 48), [AcceptedCounts(5, 1, 63)])
    assert {tree: gain.value for tree, gain in model.gains.items()} == before

"""What steps are expected to emit: chains by position, trees by their gain, whatever the text does meanwhile."""

import pytest

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.policy.accepted import AcceptedCounts, accepted_counts
from peagle.engine.policy.yield_model import GAIN, Acceptance, YieldModel
from tests.support.simulated import chain, path

TREE, LARGER = DraftShape(7, 16), DraftShape(7, 32)
FORMS = (NO_DRAFT, chain(3), chain(7), TREE, LARGER)


def told(
    steps: int,
    form: DraftShape,
    kept: int,
    expected: YieldModel,
    of_chain: int = 0,
    of_tree: int = 0,
) -> None:
    """`of_chain`, `of_tree`: what the chain and the smaller tree would have kept of a tree's drafts."""
    sizes = (
        [(TREE.nodes, of_tree), (LARGER.nodes, kept)] if form == LARGER else [(form.nodes, kept)]
    )
    held = accepted_counts(kept, () if form.is_chain else (of_chain, path(sizes)))
    for _ in range(steps):
        expected.observe(1, form, [held])


def test_what_a_tree_shows_of_other_forms() -> None:
    held = AcceptedCounts(kept=4, chain=2, path=sum(1 << row for row in (0, 5, 6, 17, 24)))
    assert [held.by(nodes) for nodes in (0, 5, 6, 16, 17, 23, 24, 62)] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert held.tried(7) == 3 and held.tried(2) == 2
    assert AcceptedCounts(kept=4, chain=5).tried(7) == 5, (
        "whether the next one holds, the step does not show"
    )
    assert accepted_counts(3, ()).tried(7) == 4 and accepted_counts(3, ()).tried(3) == 3


def test_without_speculation_nothing_is_learned_about_acceptance() -> None:
    acceptance = Acceptance(7)
    for _ in range(100):
        acceptance.observe(1, 7, [AcceptedCounts(3, 3)])
    before = acceptance.tokens()
    assert before[3] > 3.9 and before[7] < 4.2
    for _ in range(500):
        acceptance.observe(1, 0, [AcceptedCounts(0, 0)])
    assert acceptance.tokens()[1] == pytest.approx(before[1])
    for _ in range(4):  # old evidence weighs little by now
        acceptance.observe(1, 1, [AcceptedCounts(0, 0)])
    assert acceptance.tokens()[1] < 1.4


def test_a_tree_that_never_ran_is_worth_a_try() -> None:
    expected = YieldModel(FORMS)
    told(100, chain(7), 2, expected)
    tokens = expected.tokens()
    assert tokens[chain(7)] == pytest.approx(3, rel=0.05) and tokens[NO_DRAFT] == 1
    assert tokens[TREE] >= 1 + 0.95 * GAIN * 2 and tokens[LARGER] >= tokens[TREE]


def test_a_trees_step_tells_of_every_smaller_form() -> None:
    expected = YieldModel(FORMS)
    told(1000, LARGER, 5, expected, of_chain=2, of_tree=4)
    tokens = [expected.tokens()[form] for form in FORMS]
    assert tokens == pytest.approx([1, 3, 3, 5, 6], rel=0.02)


def test_a_chain_that_goes_on_behind_what_a_tree_shows() -> None:
    """Where chains hold for ever, a tree that keeps two shows three of their drafts: the rest was seen before."""
    expected = YieldModel(FORMS)
    told(200, chain(7), 7, expected)
    told(400, LARGER, 2, expected, of_chain=3, of_tree=2)
    tokens = expected.tokens()
    assert tokens[chain(7)] > 6.5 and tokens[chain(3)] == pytest.approx(4, rel=0.01)
    assert tokens[LARGER] == pytest.approx(3, rel=0.1)


def test_what_has_not_run_changes_with_the_text() -> None:
    """Twice as much is kept of what runs; so it will be of what does not."""
    expected = YieldModel(FORMS)
    told(500, TREE, 2, expected, of_chain=1)
    told(60, TREE, 4, expected, of_chain=2)
    assert expected.tokens()[chain(7)] == pytest.approx(3, rel=0.05)
    told(100, chain(7), 1, expected)
    assert expected.tokens()[TREE] == pytest.approx(3, rel=0.1)


def test_what_is_known_less_looks_better() -> None:
    """Of two that were seen to keep no more than chains, the one that was seen less."""
    often, seldom = YieldModel(FORMS), YieldModel(FORMS)
    told(1000, LARGER, 2, often, of_chain=2, of_tree=2)
    told(5, LARGER, 2, seldom, of_chain=2, of_tree=2)
    for expected in (often, seldom):
        told(300, chain(7), 2, expected)
    assert often.tokens()[LARGER] == pytest.approx(often.tokens()[chain(7)], rel=0.02)
    assert seldom.tokens()[LARGER] > 1.03 * seldom.tokens()[TREE] > 1.06 * often.tokens()[TREE]


def test_a_gain_comes_back_from_text_where_chains_keep_nothing() -> None:
    expected = YieldModel(FORMS)
    told(3000, TREE, 1, expected)
    told(300, TREE, 3, expected, of_chain=2)
    assert expected.tokens()[TREE] == pytest.approx(4, rel=0.1)


def test_bad_text_for_ever_leaves_numbers() -> None:
    expected = YieldModel(FORMS)
    told(200_000, chain(1), 0, expected)
    assert expected.tokens()[LARGER] == pytest.approx(1)
    told(100, chain(7), 3, expected)
    assert expected.tokens()[LARGER] > 4


def test_nothing_is_kept_beyond_the_depth() -> None:
    expected = YieldModel(FORMS)
    told(200, chain(3), 3, expected)
    told(200, LARGER, 7, expected, of_chain=2, of_tree=5)
    assert all(tokens <= form.k + 1 for form, tokens in expected.tokens().items())


def test_a_drafter_may_know_better() -> None:
    """Its outlook replaces what chains kept lately; a tree keeps its gain over them."""
    expected = YieldModel((NO_DRAFT, chain(3), chain(7), LARGER))
    told(1000, LARGER, 3, expected, of_chain=2)
    tokens = expected.tokens([0.5] * 7)
    assert tokens[chain(3)] == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert tokens[LARGER] == pytest.approx(1 + 1.5 * (tokens[chain(7)] - 1), rel=0.02)
    assert YieldModel(FORMS[:3]).tokens([0.5, 0.4])[chain(7)] < 1 + 0.5 + 0.2 + 0.2 / 0.6


def test_a_tree_nobody_asked_about_teaches_no_gain() -> None:
    expected = YieldModel(FORMS)
    before = {tree: gain.value for tree, gain in expected.gains.items()}
    expected.observe(1, DraftShape(5, 48), [AcceptedCounts(5, 1, 63)])
    assert {tree: gain.value for tree, gain in expected.gains.items()} == before

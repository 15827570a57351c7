"""What steps are expected to emit: chains by position, trees by their gain, whatever the text does meanwhile."""

import pytest

from peagle.engine.expected import GAIN, Acceptance, Expected
from peagle.tree import NOTHING, Tree
from tests.simulated import chain

TREE, LARGER = Tree(7, 16), Tree(7, 32)
FORMS = (NOTHING, chain(3), chain(7), TREE, LARGER)


def test_without_speculation_nothing_is_learned_about_acceptance() -> None:
    acceptance = Acceptance(7)
    for _ in range(100):
        acceptance.observe(1, 7, [3])
    before = acceptance.tokens()
    assert before[3] > 3.9 and before[7] < 4.2
    for _ in range(500):
        acceptance.observe(1, 0, [])
    assert acceptance.tokens()[1] == pytest.approx(before[1])
    for _ in range(4):  # old evidence weighs little by now
        acceptance.observe(1, 1, [0])
    assert acceptance.tokens()[1] < 1.4


def told(steps: int, form: Tree, accepted: int, expected: Expected) -> None:
    for _ in range(steps):
        expected.observe(1, form, [accepted])


def test_a_tree_that_never_ran_is_worth_a_try() -> None:
    expected = Expected(FORMS)
    told(100, chain(7), 2, expected)
    tokens = expected.tokens()
    assert tokens[chain(7)] == pytest.approx(3, rel=0.05) and tokens[NOTHING] == 1
    assert tokens[TREE] >= 1 + 0.95 * GAIN * 2 and tokens[LARGER] >= tokens[TREE]


def test_trees_teach_nothing_about_positions_of_chains() -> None:
    expected = Expected(FORMS)
    told(100, chain(7), 2, expected)
    shares = expected.chains.tokens()
    for _ in range(200):
        told(1, chain(7), 2, expected)
        told(4, LARGER, 4, expected)
    assert expected.chains.tokens() == pytest.approx(shares, rel=0.05)
    tokens = expected.tokens()
    assert tokens[chain(7)] == pytest.approx(3, rel=0.1) and tokens[LARGER] == pytest.approx(5, rel=0.1)


def test_what_has_not_run_changes_with_the_text() -> None:
    """Twice as much is kept of what runs; so it will be of what does not."""
    expected = Expected(FORMS)
    for _ in range(200):
        told(1, chain(7), 1, expected)
        told(1, TREE, 2, expected)
    told(60, TREE, 4, expected)
    assert expected.tokens()[chain(7)] == pytest.approx(3, rel=0.25)
    told(60, chain(7), 1, expected)
    assert expected.tokens()[TREE] == pytest.approx(3, rel=0.25)


def test_more_nodes_keep_no_less() -> None:
    expected = Expected(FORMS)
    for _ in range(100):
        told(1, chain(7), 2, expected)
        told(1, TREE, 4, expected)
        told(1, LARGER, 2, expected)
    tokens = expected.tokens()
    assert tokens[LARGER] >= tokens[TREE] > 4.5


def test_nothing_is_kept_beyond_the_depth() -> None:
    expected = Expected(FORMS)
    told(200, chain(3), 3, expected)
    told(200, LARGER, 7, expected)
    assert all(tokens <= form.k + 1 for form, tokens in expected.tokens().items())


def test_a_drafter_may_know_better() -> None:
    """Its outlook replaces what chains kept lately; a tree keeps its gain over them."""
    expected = Expected((NOTHING, chain(3), chain(7), LARGER))
    for _ in range(300):
        told(1, chain(7), 2, expected)
        told(1, LARGER, 3, expected)
    tokens = expected.tokens([0.5] * 7)
    assert tokens[chain(3)] == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert tokens[LARGER] == pytest.approx(1 + 1.5 * (tokens[chain(7)] - 1), rel=0.1)
    assert Expected(FORMS[:3]).tokens([0.5, 0.4])[chain(7)] < 1 + 0.5 + 0.2 + 0.2 / 0.6


def test_a_tree_nobody_asked_about_is_left_out() -> None:
    expected = Expected(FORMS)
    before = expected.tokens()
    expected.observe(1, Tree(5, 48), [5])
    assert expected.tokens() == before

"""On-policy weights of anchors and the tree loss: worked examples, and no effect if disabled."""

from pathlib import Path

import pytest
import torch

from peagle.train.objective import gradients, length_objective
from peagle.train.objective.length_objective import TREE_THRESHOLD, TREE_WIDTH, tree_gain
from peagle.train.objective.on_policy import landing_weights
from tests.support.train.training import make_run, some_answers, some_config, train


def test_the_example_of_the_docstring() -> None:
    """Answer x2..x7: rows 0..5 are supervised; row 2 is wrong about x4."""
    rows = torch.arange(6, dtype=torch.int32)
    matches = torch.tensor([0.0, 1, 0, 1, 1, 1])
    weights = landing_weights(0.8, rows, matches, 8)
    relative = weights / weights[1]
    torch.testing.assert_close(relative, torch.tensor([1, 1, 0.2, 1, 0.2, 0.2, 0.2, 1]))
    assert weights[:6].mean() == pytest.approx(1)


def test_a_drafter_without_mistakes_keeps_all_anchors() -> None:
    weights = landing_weights(0.5, torch.arange(5), torch.ones(5), 6)
    assert weights[0] == 2 * weights[1] and weights[:5].mean() == pytest.approx(1)


def test_the_gain_of_a_tree() -> None:
    """The derivative of the soft count of kept prefixes; none for rows that do not exist."""
    log_q = torch.tensor([[-0.1, -2.0, -2.0, -0.5], [-0.01, -0.01, -9.0, -1.0]], requires_grad=True)
    kept = torch.sigmoid((log_q.cumsum(1) - TREE_THRESHOLD) / TREE_WIDTH)
    [expected] = torch.autograd.grad(kept.sum(), log_q)
    gain = tree_gain(log_q.detach().exp())
    torch.testing.assert_close(gain.flip(1).cumsum(1).flip(1), expected)
    assert gain[0, 1:3].min() > 3 * gain[1, :2].max(), (
        "paths near the threshold must have the largest gain"
    )
    missing = tree_gain(torch.tensor([[0.5, 0.0, 0.0]]))
    assert missing[0, 0] > 0 and not missing[0, 1:].any()


def run_losses(folder: Path, **changes: object) -> list[float]:
    target, data = some_answers()
    config = some_config(data / "answers.jsonl", folder, steps=3, save_every=0, **changes)
    return [e["loss"] for e in train(make_run(target, config)) if "loss" in e]


def test_off_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabled, none of this code runs; `on_policy=0.0` gives the same bits."""
    plain = run_losses(tmp_path / "a")
    weighted = run_losses(tmp_path / "b", on_policy=0.8)
    assert plain[0] == pytest.approx(weighted[0]) and plain[2] != weighted[2]

    def refuse(*_: object) -> None:
        raise AssertionError("called although it is disabled")

    monkeypatch.setattr(gradients, "landing_weights", refuse)
    monkeypatch.setattr(length_objective, "tree_gain", refuse)
    assert run_losses(tmp_path / "c", on_policy=0.0) == plain
    run_losses(tmp_path / "d", loss="length")

"""Training for 4 bits: passes use rounded weights, and the optimizer keeps the exact ones."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.formats import int4
from peagle.drafter.formats.row_format import RowFormat
from peagle.errors import UserError
from peagle.train.optim.rounded_weights import SCALE_STEPS, RoundedWeights
from peagle.train.trainer import Trainer
from tests.support.models.tiny_models import add_noise, make_drafter, make_target
from tests.support.train.training import config_in, start, train

ROWS = RowFormat(4, 16, ("fc",))


def tiny_weights() -> RoundedWeights:
    drafter = make_drafter(make_target(), "p-eagle", 2)
    add_noise(drafter, 0.1)
    return RoundedWeights(drafter, ROWS)


def test_weights_are_rounded_inside_the_context_only() -> None:
    weights = tiny_weights()
    before = [m.detach().clone() for m in weights.matrices]
    assert len(before) >= 2 * 7, "the matrices of two layers"
    with weights.in_use(0):
        inside = [m.detach().clone() for m in weights.matrices]
    for exact, rounded, now in zip(before, inside, weights.matrices, strict=True):
        assert torch.equal(exact, now)
        stored = int4.quantize(exact, ROWS.group)
        decoded = int4.dequantize("x", *stored)
        assert torch.allclose(rounded, decoded, atol=1e-6) and not torch.equal(rounded, exact)


def test_scales_are_recomputed_after_some_steps() -> None:
    weights = tiny_weights()
    with weights.in_use(3):
        scales = weights.scales
    with torch.no_grad():
        weights.matrices[0].mul_(2)
    with weights.in_use(SCALE_STEPS - 1):
        assert weights.scales is scales
    with weights.in_use(SCALE_STEPS):
        assert torch.allclose(weights.scales[0], 2 * scales[0])


def test_exact_weights_are_restored_after_an_error() -> None:
    weights = tiny_weights()
    before = [m.detach().clone() for m in weights.matrices]
    with pytest.raises(InterruptedError), weights.in_use(0):
        raise InterruptedError
    assert all(torch.equal(a, b) for a, b in zip(before, weights.matrices, strict=True))


def rounded_steps(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of a run that use rounded weights."""
    steps = list[int]()
    plain = trainer._rounding

    def rounding() -> AbstractContextManager[None]:
        context = plain()
        if not isinstance(context, nullcontext):
            steps.append(trainer.step)
        return context

    monkeypatch.setattr(trainer, "_rounding", rounding)
    train(trainer)
    return steps


def test_the_last_steps_of_a_run_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(config_in(tmp_path, steps=8, bits=4, rounded=0.5))
    assert rounded_steps(trainer, monkeypatch) == [4, 5, 6, 7]


def test_rounding_in_a_timed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 seconds, the last 2.4 are rounded; the first step does not count."""
    config = config_in(tmp_path, steps=10_000, minutes=0.1, bits=4, rounded=0.4)
    trainer = start(config)
    elapsed = [0.0]
    plain = trainer._train_step

    def step(batches: Any) -> Any:
        sums = plain(batches)
        elapsed[0] += 1
        return sums

    monkeypatch.setattr(trainer, "_train_step", step)
    monkeypatch.setattr("peagle.train.trainer.time.perf_counter", lambda: elapsed[0])
    assert rounded_steps(trainer, monkeypatch) == [5, 6]


def test_scales_are_dropped_when_rounding_ends(tmp_path: Path) -> None:
    trainer = start(config_in(tmp_path, steps=8, bits=4, rounded=0.5))
    weights = trainer.rounded_weights
    assert weights is not None
    with weights.in_use(7):
        assert weights.scales
    with trainer._rounding():  # The step of the trainer is 0.
        assert not weights.scales


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounded": 0.5}, "set bits = 4"),
        ({"rounded": 1.5, "bits": 4}, "rounded is 1.5"),
        ({"rounded": 0.5, "bits": 4, "parallel": "fsdp", "optimizer": "adamw"}, "fsdp splits"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        config_in(tmp_path, **settings)

"""The trainer: runs learn, resume bit for bit, and stop with an error at invalid values."""

import itertools
import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.core import Method
from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.train.drafter_init import inherit_window
from peagle.train.features.teacher import PackFeatures
from peagle.train.journal import Journal
from peagle.train.state import list_states
from peagle.train.trainer import Trainer
from tests.support.train.training import (
    config_in,
    some_answers,
    start,
    train,
)


def losses(entries: list[dict]) -> list[float]:
    return [entry["loss"] for entry in entries if "loss" in entry]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def change_features(trainer: Trainer, call: int, do: Callable[[Tensor], Tensor]) -> None:
    """Apply `do` to the taps of one call of the features; calls count from 1."""
    plain, calls = trainer.features, itertools.count(1)

    def features(batch: Any) -> Any:
        taps, teacher = plain(batch)
        return PackFeatures(do(taps) if next(calls) == call else taps, teacher)

    trainer.features = features  # type: ignore[assignment]


def interrupt(g: Tensor) -> Tensor:
    raise InterruptedError


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_it_learns(method: Method, tmp_path):
    """The loss falls, and the acceptance length on held-out prompts rises."""
    config = config_in(
        tmp_path, method=method, pack_tokens=384, k=4, steps=40, lr=1e-2, eval_k=3, held_out=6
    )
    trainer = start(config)
    trainer.evaluate(Journal(trainer.out))
    entries = train(trainer)
    lengths = [entry["acceptance_length"] for entry in entries if "k" in entry]
    assert np.mean(losses(entries)[-5:]) < 0.4 * np.mean(losses(entries)[:5])
    assert len(lengths) == 2 and lengths[1] > lengths[0] + 0.2


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_is_bit_exact(optimizer: str, method: Method, tmp_path):
    """A run that is stopped after each of three steps and interrupted in the sixth gives the
    losses and weights of an uninterrupted run.
    """
    settings = {"optimizer": optimizer, "method": method, "packs_per_step": 2, "layers": 2}
    settings["convolution"] = method == "p-eagle"  # A convolution has its own learning rate.
    settings |= {"bits": 4, "rounded": 0.9}  # from the second step on
    uninterrupted = start(config_in(tmp_path / "uninterrupted", **settings))
    expected_entries = train(uninterrupted)
    config = config_in(tmp_path / "parts", **settings)
    for step in range(3):
        trainer = start(config)
        assert trainer.resume() == (step > 0) and trainer.step == step
        train(trainer, stop_after=0)
    trainer = start(config)
    trainer.resume()
    change_features(trainer, 2 * 2 + 2, interrupt)  # in the second pack of the sixth step
    with pytest.raises(InterruptedError):
        train(trainer)
    trainer = start(config)
    assert trainer.resume() and trainer.step == 3, "the run must resume from the state of step 3"
    entries = train(trainer)
    assert losses(entries) == losses(expected_entries) and len(losses(entries)) == 8
    assert_same(weights(trainer), weights(uninterrupted))
    one, two = (checkpoint.read(t.out / "drafter").tensors for t in (trainer, uninterrupted))
    assert_same(one, two)


def test_a_finished_run_trains_no_more_steps(tmp_path):
    train(start(config_in(tmp_path)))
    trainer = start(config_in(tmp_path))
    assert trainer.resume() and trainer.step == 8
    before = weights(trainer)
    assert (
        trainer.train(Journal(trainer.out, trainer.step), lambda *_: pytest.fail("a step")) is True
    )
    assert_same(weights(trainer), before)


CHANGES = {
    "dependency": 8,
    "lr": 0.5,
    "layers": 2,
    "draft_vocab": 40,
    "optimizer": "muon",
    "k": 4,
    "seed": 1,
    "method": "eagle3",
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_option_is_refused_by_name(key: str, tmp_path):
    train(start(config_in(tmp_path, steps=2)))
    trainer = start(config_in(tmp_path, steps=2, **{key: CHANGES[key]}))
    with pytest.raises(UserError, match=f"was started with {key} = "):
        trainer.resume()


def test_a_state_without_a_newer_option(tmp_path):
    """The run resumes without the new option, and is refused with it."""
    train(start(config_in(tmp_path, steps=2)))
    for path in list_states(tmp_path / "run" / "state"):
        state = torch.load(path, weights_only=True)
        del state["config"]["dependency"]
        torch.save(state, path)
    assert start(config_in(tmp_path, steps=2)).resume()
    with pytest.raises(UserError, match="was started with dependency = 0, now it is 8"):
        start(config_in(tmp_path, steps=2, dependency=8)).resume()


def test_options_without_effect_on_results_may_change(tmp_path):
    uninterrupted = start(config_in(tmp_path / "uninterrupted"))
    train(uninterrupted)
    train(start(config_in(tmp_path)), stop_after=0)
    free = {
        "segments": 2,
        "checkpointing": True,
        "log_every": 2,
        "eval_k": 1,
        "save_every": 0,
        "eval_every": 5,
    }
    trainer = start(config_in(tmp_path, **free))
    assert trainer.resume()
    train(trainer)
    for name, weight in weights(uninterrupted).items():
        torch.testing.assert_close(weights(trainer)[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_nan_loss_stops_the_run(log_every: int, tmp_path):
    trainer = start(config_in(tmp_path, log_every=log_every))
    change_features(trainer, 5, lambda g: g * float("nan"))
    key = trainer.dataset.document_keys(4)[0]
    with pytest.raises(UserError, match=rf"the loss of step 4 is nan: stopped.*{key}"):
        train(trainer)
    assert [path.name for path in list_states(trainer.out / "state")] == ["step-00000003.pt"]
    again = start(config_in(tmp_path, log_every=log_every))
    assert again.resume() and again.step == 3
    assert all(weight.isfinite().all() for weight in weights(again).values())


def test_weights_after_a_nan_gradient_are_not_saved(tmp_path):
    """The loss of that step is still finite, but the weights are not."""
    trainer = start(config_in(tmp_path))
    trainer.drafter.fc.weight.register_hook(
        lambda grad: grad * float("nan") if trainer.step == 2 else grad
    )
    with pytest.raises(UserError, match="the loss of step 2 is nan"):
        train(trainer)
    assert list_states(trainer.out / "state") == []


def test_trained_embeddings_are_stored(tmp_path):
    target, _ = some_answers()
    before = target.embedding.clone()
    trainer = start(config_in(tmp_path, train_embeddings=True))
    train(trainer)
    assert torch.equal(target.embedding, before), "training changed the target's own embeddings"
    drafter = checkpoint.load(trainer.out / "drafter", target, torch.float32)
    moved = (trainer.drafter.embed_tokens.detach() - before).abs().amax(1)
    assert moved.max() > 1e-3
    torch.testing.assert_close(
        drafter.embed_tokens, trainer.drafter.embed_tokens.detach(), rtol=0.01, atol=1e-4
    )
    assert "embed_tokens.weight" in checkpoint.read(trainer.out / "drafter").stored
    folder = shutil.copytree(trainer.out / "drafter", tmp_path / "learned")
    again = start(config_in(tmp_path / "again", init=str(folder), steps=1))
    assert torch.equal(again.drafter.embed_tokens, drafter.embed_tokens), (
        "a continued run starts with other embeddings"
    )
    plain = start(config_in(tmp_path / "plain", steps=1))
    train(plain)
    assert "embed_tokens.weight" not in checkpoint.read(plain.out / "drafter").stored


def test_a_run_continues_from_a_drafter(tmp_path):
    first = start(config_in(tmp_path))
    train(first)
    folder = shutil.copytree(first.out / "drafter", tmp_path / "first")
    second = start(config_in(tmp_path / "more", init=str(folder), steps=2))
    for name, weight in weights(second).items():
        torch.testing.assert_close(weight, weights(first)[name].bfloat16().float(), rtol=0, atol=0)
    entries = train(second)
    assert losses(entries)[0] < 1.5 * losses(entries)[1] and second.step == 2
    with pytest.raises(UserError, match=r"cannot initialize from .*num_layers"):
        start(config_in(tmp_path / "other", init=str(folder), layers=2))


def test_the_schedule_of_a_timed_run_ends_with_its_time(tmp_path, monkeypatch):
    """The first step, which compiles, takes a minute; later ones take a second each."""
    trainer = start(config_in(tmp_path, steps=10_000, minutes=0.5, final_lr=0.0, log_every=1))
    elapsed = [0.0]
    plain = trainer._train_step

    def step(batches: Any) -> Any:
        sums = plain(batches)
        elapsed[0] += 60 if trainer.step == 0 else 1
        return sums

    monkeypatch.setattr(trainer, "_train_step", step)
    monkeypatch.setattr("peagle.train.trainer.time.perf_counter", lambda: elapsed[0])
    entries = [entry for entry in train(trainer) if "lr" in entry]
    assert trainer.step == 31
    assert entries[-1]["lr"] < 0.02 * trainer.config.lr < entries[15]["lr"]
    assert (trainer.out / "drafter").is_dir()
    again = start(config_in(tmp_path, steps=10_000, minutes=0.5, final_lr=0.0))
    assert again.resume() and again.train(Journal(again.out, again.step), print)
    assert again.step == 31, "the time was used up before the run resumed"


def test_a_resumed_timed_run_keeps_its_clock(tmp_path, monkeypatch):
    """After resuming, the first step, which compiles, does not count; evaluations do."""
    elapsed = [0.0]
    monkeypatch.setattr("peagle.train.trainer.time.perf_counter", lambda: elapsed[0])

    def begin() -> Trainer:
        config = config_in(tmp_path, steps=10_000, minutes=10, eval_every=2, log_every=1)
        trainer = start(config)
        plain = trainer._train_step

        def step(batches: Any) -> Any:
            elapsed[0] += 60 if trainer.clock_start == math.inf else 1
            return plain(batches)

        def evaluate(journal: Journal) -> None:
            elapsed[0] += 20

        monkeypatch.setattr(trainer, "_train_step", step)
        monkeypatch.setattr(trainer, "evaluate", evaluate)
        return trainer

    first = begin()
    assert not first.train(Journal(first.out, 0), lambda *_: None, stop_after=81)
    assert first.step == 3 and first.seconds == 62
    second = begin()
    assert second.resume() and second.seconds == 62
    assert second._clock() == first._clock() == 1 + 20 + 1
    path = list_states(second.out / "state")[-1]
    older = torch.load(path, weights_only=True)
    del older["clock"]
    torch.save(older, path)
    assert second.resume() and second._clock() == 62, "a state of an older version"


def test_a_continued_drafter_keeps_its_window(tmp_path):
    first = start(config_in(tmp_path, sliding_window=64, steps=1))
    train(first)
    folder = shutil.copytree(first.out / "drafter", tmp_path / "first")
    for window, expected in ((0, 64), (-1, -1), (80, 80)):
        config = config_in(tmp_path / "more", init=str(folder), sliding_window=window)
        assert inherit_window(config).sliding_window == expected
    assert inherit_window(config_in(tmp_path)).window is None
    run = start(inherit_window(config_in(tmp_path / "more", init=str(folder))))
    assert run.drafter.config.sliding_window == run.dataset.layout.window == 64


@pytest.mark.parametrize(
    "more", [{"max_anchors": 30}, {"max_anchors": 30, "method": "eagle3"}, {"k": 1, "eval_k": 1}]
)
def test_fixed_shapes_and_one_depth(more: dict, tmp_path):
    """Fixed shapes (`max_anchors`), and a single depth."""
    trainer = start(config_in(tmp_path, **more))
    entries = train(trainer)
    assert losses(entries)[-1] < losses(entries)[0] and trainer.step == 8


@pytest.mark.parametrize("loss", ["tv", "tvmix", "lk", "length", "dpace", "tree"])
def test_other_losses_learn(loss: str, tmp_path):
    """The acceptance length rises with every loss, also if only some anchors have chains."""
    more = {
        "pack_tokens": 192,
        "k": 4,
        "steps": 40,
        "lr": 1e-2,
        "eval_k": 3,
        "held_out": 6,
        "max_anchors": 50,
    }
    trainer = start(config_in(tmp_path, loss=loss, **more))
    trainer.evaluate(Journal(trainer.out))
    lengths = [entry["acceptance_length"] for entry in train(trainer) if "k" in entry]
    assert len(lengths) == 2 and lengths[1] > lengths[0] + 0.3


@pytest.mark.parametrize("switch", ["norm_before_fc", "fc_norm"])
def test_norms_around_fc_are_trained_and_stored(switch: str, tmp_path):
    trainer = start(config_in(tmp_path, **{switch: True}))
    train(trainer)
    drafter = checkpoint.load(trainer.out / "drafter", trainer.target, torch.float32)
    assert getattr(drafter.config, switch)
    norms = [
        p for name, p in drafter.named_parameters() if name.startswith(("input_norm", "fc_norm"))
    ]
    assert norms and all((norm != 1).any() for norm in norms)

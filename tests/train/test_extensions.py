"""Extensions of a plain drafter (inject, bidirectional, convolution, refinement, dependency,
confidence): they start without effect, are trained, stored and served.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peagle.core import Sampling
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.drafter.formats.row_format import INT8
from peagle.errors import UserError
from peagle.reference import reference
from peagle.reference.decode import decode
from peagle.reference.proposer import Verified, proposer_for
from peagle.target import Target, default_aux_layer_ids
from peagle.train.config import TrainConfig
from peagle.train.data.pack import Batch
from peagle.train.drafter_init import init_from_target
from peagle.train.evaluation.replay import acceptance_length
from peagle.train.features.features import (
    CachedFeatures,
    FeatureExtractor,
    FeatureSource,
    SelectedTaps,
    select_taps,
)
from peagle.train.features.teacher import PackFeatures
from peagle.train.objective.passes import DrafterPasses
from peagle.train.optim.optimizer import Optimizers
from peagle.train.setup import apply_capture
from peagle.train.trainer import Trainer
from tests.support.engine.engines import K, engine_of, pair_of, serve
from tests.support.models.tiny_models import AUX, add_noise, make_drafter, make_target
from tests.support.train.training import (
    EXTENSIONS,
    make_run,
    prompts,
    some_answers,
    some_batch,
    some_config,
    some_pack,
    train,
    trained,
)

GREEDY = Sampling()


def with_noise(
    target: Target, layers: int = 3, draft_vocab: int | None = 40, **switches: Any
) -> Drafter:
    """A drafter with noise on every weight, so that no weight is zero and rows differ."""
    drafter = make_drafter(target, "p-eagle", layers, draft_vocab, **switches)
    add_noise(drafter, 0.4)
    return drafter


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_with_and_without_a_cache(extension: str, target: Target, prompt) -> None:
    """The drafts are the same after a prompt, and after a step with a rejected token."""
    drafter = with_noise(target, **EXTENSIONS[extension])
    target.tap(AUX)
    ids = torch.tensor(prompt(12))
    g, more = target.forward(ids).hidden, torch.randn(1, 3 * 32)
    for k in (1, 2, 6):
        proposer = proposer_for(drafter)
        first = proposer.propose(Verified(ids[:7], g[:7], 0, 0, ids[7:8]), k)
        block = torch.cat([ids[7:11], torch.tensor([90])])
        second = proposer.propose(Verified(block, torch.cat([g[7:11], more]), 7, 1, ids[11:]), k)
        assert torch.equal(first, reference.propose(drafter, g[:7], ids[:8], k))
        assert torch.equal(second, reference.propose(drafter, g[:11], ids, k))
        assert k < 6 or len(torch.cat([first, second]).unique()) > 2, (
            "the drafts hardly differ, so the comparison proves little"
        )


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_it_starts_as_the_plain_drafter(extension: str, target: Target, prompt) -> None:
    """With the same seed, weights and drafts are the same; `bidirectional` adds no weights."""
    plain, more = (
        make_drafter(target, "p-eagle", 2, 40),
        make_drafter(target, "p-eagle", 2, 40, **EXTENSIONS[extension]),
    )
    own = more.state_dict()
    assert all(torch.equal(own.pop(name), tensor) for name, tensor in plain.state_dict().items())
    assert bool(own) == (extension != "bidirectional")
    if not more.config.bidirectional:
        target.tap(AUX)
        ids = torch.tensor(prompt(12))
        g = target.forward(ids[:-1]).hidden
        assert torch.equal(*(reference.propose(drafter, g, ids, 6) for drafter in (plain, more)))


@pytest.mark.parametrize("int8", [False, True])
def test_folders_store_them(int8: bool, target: Target, tmp_path: Path) -> None:
    drafter = with_noise(target, **EXTENSIONS["all"], calibration=(1.0, 0.8, 0.7))
    compact.save(drafter, tmp_path / "d", target, rows=INT8 if int8 else None)
    assert checkpoint.read(tmp_path / "d").problems() == []
    back = checkpoint.load(tmp_path / "d", target)
    assert back.config == drafter.config and back.config.calibration == (1.0, 0.8, 0.7)
    for name, tensor in drafter.state_dict().items():
        near = 0.02 * float(tensor.abs().max()) if int8 and tensor.ndim == 2 else 0
        torch.testing.assert_close(back.state_dict()[name], tensor, rtol=0, atol=near)
    normed = torch.randn(9, 5, 32)
    same = (back.drafts(normed) == drafter.drafts(normed)).float().mean()
    assert same == 1 or (int8 and same > 0.8)


def test_folders_without_the_new_keys_load(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 2)
    compact.save(drafter, tmp_path / "d", target)
    file = tmp_path / "d" / "config.json"
    config = json.loads(file.read_text())
    keys = ("inject", "bidirectional", "convolution", "refinement", "dependency", "confidence")
    for key in (*keys, "calibration"):
        del config[key]
    file.write_text(json.dumps(config))
    assert checkpoint.load(tmp_path / "d", target).config == drafter.config


def test_a_missing_tensor_is_named(target: Target, tmp_path: Path) -> None:
    compact.save(make_drafter(target, "p-eagle", 2), tmp_path / "d", target)
    file = tmp_path / "d" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dependency": 8}))
    with pytest.raises(UserError, match=r"dependency\.before\.weight is missing"):
        checkpoint.load(tmp_path / "d", target)


def test_fused_layers_inject(prompt) -> None:
    """The engine drafts and accepts what the plain loop does, but not without `inject`."""
    one = trained("p-eagle", 48, "inject")
    drafter = copy.deepcopy(one.drafter)
    for linear in drafter.inject:
        linear.weight.data.mul_(3)
    requests = [(ids, {"max_tokens": 20, "ignore_eos": True}) for ids in prompts(8)]
    served = []
    for injected in (True, False):
        engine = engine_of(pair_of(one.target, {"p-eagle": drafter}), "p-eagle")
        if not injected:
            engine.loop.stepper.drafter.layers.inject = None
        served.append(
            [[(s.tokens, s.accepted) for s in steps] for steps in serve(engine, requests)]
        )
    one.target.tap(AUX)
    expected = [
        list(decode(one.target, proposer_for(drafter), ids, K, 20, GREEDY)) for ids, _ in requests
    ]
    assert served[0] == [[(s.tokens, s.accepted) for s in steps] for steps in expected]
    assert (
        served[0] != served[1]
        and sum(accepted for steps in served[0] for _, accepted in steps) > 20
    )


def test_fused_layers_convolve(prompt) -> None:
    """The engine drafts and accepts what the plain loop does, but not without the convolution."""
    one = trained("p-eagle", 48, "convolution")
    drafter = copy.deepcopy(one.drafter)
    add_noise(drafter.convolution, 0.3)
    requests = [(ids, {"max_tokens": 20, "ignore_eos": True}) for ids in prompts(8)]
    served = []
    for convolved in (True, False):
        engine = engine_of(pair_of(one.target, {"p-eagle": drafter}), "p-eagle")
        if not convolved:
            engine.loop.stepper.drafter.layers.convolution = []
        served.append(
            [[(s.tokens, s.accepted) for s in steps] for steps in serve(engine, requests)]
        )
    one.target.tap(AUX)
    expected = [
        list(decode(one.target, proposer_for(drafter), ids, K, 20, GREEDY)) for ids, _ in requests
    ]
    assert served[0] == [[(s.tokens, s.accepted) for s in steps] for steps in expected]
    assert served[0] != served[1]
    assert sum(accepted for steps in served[0] for _, accepted in steps) > 20


# Taps.


def test_selecting_some_of_the_taps(target: Target) -> None:
    five, batch = (0, 1, 3, 5, 6), some_batch(some_pack(), 4)
    expected, last = FeatureExtractor(target, AUX)(batch)
    whole = FeatureExtractor(target, five)
    some = select_taps(whole, AUX)
    assert (
        isinstance(some, SelectedTaps)
        and torch.equal(some(batch)[0], expected)
        and torch.equal(some(batch)[1], last)
    )
    assert select_taps(some, five) is whole and select_taps(whole, five) is whole
    target.tap(AUX)  # other taps are set in between
    assert whole(batch)[0].shape[1] == 5 * 32 and torch.equal(some.uncached()(batch).taps, expected)
    with pytest.raises(
        UserError, match=r"taps \[2\] are not among the available ones, \[0, 1, 3, 5, 6\]"
    ):
        select_taps(whole, (1, 2))


def test_runs_share_features_with_more_taps(tmp_path: Path) -> None:
    """The second run selects three of five taps, and trains as one with its own features."""
    target, folder = some_answers()
    data, five = folder / "answers.jsonl", (0, 1, 3, 5, 6)
    first = make_run(
        target, some_config(data, tmp_path / "five", aux_layer_ids=five, steps=2, init="target")
    )
    first.features = CachedFeatures(first.features, first.data.documents)
    train(first)
    config = some_config(data, tmp_path / "three", steps=3)
    second = Trainer(config, target, first.data, first.world, first.features)
    assert second.drafter.config.num_taps == 3 and isinstance(
        second.features.uncached(), SelectedTaps
    )
    shared = [entry["loss"] for entry in train(second) if "loss" in entry]
    own = make_run(target, some_config(data, tmp_path / "own", steps=3))
    assert shared == pytest.approx(
        [entry["loss"] for entry in train(own) if "loss" in entry], rel=1e-5
    )


@pytest.mark.parametrize("aux", [AUX, (0, 1, 3, 5, 6)])
def test_initialization_from_the_target_with_any_taps(aux: tuple[int, ...], target: Target) -> None:
    """fc adds a copy of the last tap; the weights of `inject` start at zero."""
    trainer = make_run(
        target,
        some_config(some_answers()[1] / "answers.jsonl", Path("x"), aux_layer_ids=aux, layers=2),
    )
    drafter = make_drafter(target, "p-eagle", 2, inject=True)
    init_from_target(drafter, target)
    assert not drafter.inject[0].weight.any()
    before = trainer.drafter.fc.weight.detach().clone()
    init_from_target(trainer.drafter, target)
    added = trainer.drafter.fc.weight.detach() - before
    torch.testing.assert_close(added[:, -32:], torch.eye(32))
    assert not added[:, :-32].any() and trainer.drafter.fc.weight.shape[1] == 32 * len(aux)
    assert len(default_aux_layer_ids(8)) == 3


# Options.


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *(
            (
                {"method": "eagle3", name: 1 if name in ("dependency", "refinement") else True},
                f"{name} needs a p-eagle drafter",
            )
            for name in (
                "inject",
                "bidirectional",
                "convolution",
                "refinement",
                "dependency",
                "confidence",
            )
        ),
        ({"norm_output": True}, "norm_output needs an eagle3 drafter"),
        ({"dependency": 257}, "dependency is 257"),
        ({"dependency": -1}, "dependency is -1"),
        ({"dependency_drop": 1.5}, "dependency_drop is 1.5"),
        ({"on_policy": 1.0}, r"on_policy is 1.0: it must be in \[0, 1\)"),
        ({"intermediate_size": -8}, "intermediate_size is -8: it must be 0 or more"),
        ({"refinement": 3}, r"refinement is 3: it must be in 0\.\.2"),
        ({"refinement": -1}, "refinement is -1"),
        (
            {"freeze": True, "init": "some/folder"},
            "freeze trains a refinement, a dependency or a confidence",
        ),
        ({"freeze": True, "dependency": 8}, "init to that drafter's folder"),
        (
            {"freeze": True, "dependency": 8, "init": "x", "train_embeddings": True},
            "leave out train_embeddings",
        ),
    ],
)
def test_settings_that_do_not_fit(wrong: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainConfig(**wrong)


def test_matrices_go_to_muon_and_the_confidence_to_adamw(target: Target) -> None:
    drafter = make_drafter(target, "p-eagle", 2, **EXTENSIONS["all"]).requires_grad_(True)
    adamw, muon = (
        {id(p) for group in part.param_groups for p in group["params"]}
        for part in Optimizers(drafter, TrainConfig(optimizer="muon"), 10).parts
    )
    for name, parameter in drafter.named_parameters():
        expected = (
            muon
            if name.startswith(("dependency", "inject"))
            else adamw
            if "confidence" in name
            else adamw | muon
        )
        assert id(parameter) in expected, name
    drafter.requires_grad_(False)
    drafter.dependency.requires_grad_(True)
    assert len(Optimizers(drafter, TrainConfig(optimizer="muon"), 10).parts) == 1, (
        "AdamW has no parameters, so it should be left out"
    )


# Learning.

A, B, C, P, Q, S = 10, 20, 30, 40, 50, 60


class Bigrams:
    """FeatureExtractor of a target whose next token depends on the last one: S is followed by A,
    B or C; A is followed by P, and B and C by Q.

    Two positions after S, the likeliest token is Q; after the likeliest draft, A, it is P.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.softcap, self.aux_layer_ids = target, 0.0, AUX

    def uncached(self) -> FeatureSource:
        return self

    def __call__(self, batch: Batch) -> PackFeatures:
        rows = self.target.lm_head[batch.next_ids]
        last_hidden = 30 * rows / rows.norm(dim=-1, keepdim=True) ** 2
        return PackFeatures(torch.zeros(len(batch.ids), 3 * 32), last_hidden)


def bigrams(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(60):
            chosen = rng.choice([A, B, C], 14, p=[0.4, 0.3, 0.3]).tolist()
            ids = [7, 8] + [token for x in chosen for token in (S, x, P if x == A else Q)]
            file.write(json.dumps({"key": f"{i}@0", "ids": ids, "spans": [[2, len(ids)]]}) + "\n")
    return path


Learned = tuple[Trainer, np.ndarray, float]  # a run, its last losses per depth, acceptance length


def learned(folder: Path, name: str, **changes: Any) -> Learned:
    target = make_target()
    settings = {
        "steps": 60,
        "lr": 1e-2,
        "save_every": 0,
        "held_out": 10,
        "k": 6,
        "eval_k": 5,
        "dependency_drop": 0.2,
    }
    config = some_config(bigrams(folder / "data.jsonl"), folder / name, **settings | changes)
    trainer = make_run(target, config)
    trainer.features = Bigrams(target)  # type: ignore[assignment]
    entries = train(trainer)
    losses = np.mean([entry["loss_per_depth"] for entry in entries if "loss" in entry][-5:], 0)
    return trainer, losses, entries[-1]["acceptance_length"]


@pytest.fixture(scope="module")
def learned_plain(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    return learned(tmp_path_factory.mktemp("bigrams"), "plain")


@pytest.mark.slow
def test_a_dependency_learns_to_use_the_previous_token(
    learned_plain: Learned, tmp_path: Path
) -> None:
    """Trained together with the drafter, or later, while the trained drafter is frozen."""
    plain, losses, length = learned_plain
    _, with_it, longer = learned(tmp_path, "together", dependency=8)
    assert with_it[1:].mean() < 0.8 * losses[1:].mean() and longer > length + 0.15
    folder = shutil.copytree(plain.out / "drafter", tmp_path / "finished")
    settings = {"init": str(folder), "freeze": True, "dependency": 8, "confidence": True}
    on_top, with_it, longer = learned(tmp_path, "on top", **settings)
    assert with_it[1:].mean() < 0.8 * losses[1:].mean() and longer > length + 0.15
    kept, saved = (checkpoint.read(path).tensors for path in (folder, on_top.out / "drafter"))
    assert all(torch.equal(saved.pop(name), tensor) for name, tensor in kept.items())
    assert {name.split(".")[0] for name in saved} == {"dependency", "confidence"}


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_a_refinement_learns_to_use_the_previous_token(
    learned_plain: Learned, passes: int, tmp_path: Path
) -> None:
    """Trained together with the drafter, whose first pass stays good, or later and alone."""
    plain, losses, length = learned_plain
    together, with_it, longer = learned(tmp_path, "together", refinement=passes)
    assert with_it[1:].mean() < 0.8 * losses[1:].mean() and longer > length + 0.15
    first_pass = copy.copy(together.drafter)
    first_pass.refinement, first_pass.config = None, plain.drafter.config
    own = together.held_out_steps(DrafterPasses(first_pass.eval()))
    assert acceptance_length(own) > length - 0.1
    folder = shutil.copytree(plain.out / "drafter", tmp_path / "finished")
    settings = {"init": str(folder), "freeze": True, "refinement": passes}
    on_top, with_it, longer = learned(tmp_path, "on top", **settings)
    assert with_it[1:].mean() < 0.8 * losses[1:].mean() and longer > length + 0.15
    kept, saved = (checkpoint.read(path).tensors for path in (folder, on_top.out / "drafter"))
    assert all(torch.equal(saved.pop(name), tensor) for name, tensor in kept.items())
    assert {name.split(".")[0] for name in saved} == {"refinement"}


def test_initialization_from_drafters_with_other_extensions(tmp_path: Path) -> None:
    """A plain drafter can get every extension, but an extended one cannot lose any."""
    target, folder = some_answers()
    data = folder / "answers.jsonl"
    first = make_run(
        target, some_config(data, tmp_path / "first", steps=2, layers=2, **EXTENSIONS["all"])
    )
    train(first)
    compact.save(make_drafter(target, "p-eagle", 2), tmp_path / "plain", target)
    more = make_run(
        target,
        some_config(
            data, tmp_path / "more", init=str(tmp_path / "plain"), layers=2, **EXTENSIONS["all"]
        ),
    )
    assert not more.drafter.dependency.out.weight.any() and not more.drafter.inject[0].weight.any()
    with pytest.raises(
        UserError, match=r"cannot initialize from .*its inject is True, this run's is False"
    ):
        make_run(
            target,
            some_config(
                data, tmp_path / "less", init=str(tmp_path / "first" / "drafter"), layers=2
            ),
        )
    assert apply_capture(more.config) is more.config


def test_dropped_corrections_depend_on_the_seed_only(tmp_path: Path) -> None:
    """The seed alone decides which rows are not corrected; the number of segments does not."""
    target, folder = some_answers()
    data = folder / "answers.jsonl"
    runs = []
    for name, segments in (("a", 1), ("b", 1), ("c", 4)):
        settings = {"dependency": 8, "segments": segments, "steps": 3}
        runs.append(
            [
                e["loss"]
                for e in train(make_run(target, some_config(data, tmp_path / name, **settings)))
                if "loss" in e
            ]
        )
    assert runs[0] == runs[1] and runs[0] == pytest.approx(runs[2], rel=1e-4)
    trainer = make_run(target, some_config(data, tmp_path / "d", dependency=8, dependency_drop=0.3))
    level = next(iter(trainer.dataset.load(0, 1)))[0].segments[0].levels[0]
    assert 0.2 < (level.previous_ids[: level.num_unpadded] < 0).float().mean() < 0.4

"""Helpers of the training tests: answers of a tiny target, packs, features, runs."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.paths import write_json
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import sample_chains
from peagle.train.data.pack import Batch, BatchLayout, PackedDocuments, build_batch, pack_sequences
from peagle.train.features.teacher import PackFeatures
from peagle.train.journal import Journal
from peagle.train.optim.parallel import World
from peagle.train.setup import load_training_data
from peagle.train.trainer import Trainer
from tests.support.built_once import built_once
from tests.support.models.tiny_models import AUX, MASK, make_target

# Documents: number of tokens, and the first token of the answer.
LENGTHS = ((40, 5), (1, 0), (2, 0), (70, 20), (5, 3), (3, 0))


def some_pack(lengths: tuple[tuple[int, int], ...] = LENGTHS, seed: int = 0) -> PackedDocuments:
    rng = np.random.default_rng(seed)
    documents = [(rng.integers(6, 96, n), np.arange(n) >= start) for n, start in lengths]
    return pack_sequences(documents)


def some_batch(
    packed: PackedDocuments,
    k: int,
    by_depth: bool = False,
    segments: int = 1,
    keep: float = 0.8,
    device: str = "cpu",
    bidirectional: bool = False,
    window: int | None = None,
    flex: bool = False,
    refinement: bool = False,
) -> Batch:
    chains = sample_chains(packed.max_chain_lengths, k, keep, np.random.default_rng(1))
    layout = BatchLayout(by_depth, segments, None, flex, bidirectional, window, refinement)
    return flatten(build_batch(packed, chains, layout)).to(device)


def some_features(packed: PackedDocuments, d: int = 32, taps: int = 3) -> PackFeatures:
    generator = torch.Generator().manual_seed(3)
    size = len(packed.ids)
    taps_values = torch.randn(size, taps * d, generator=generator)
    return PackFeatures(taps_values, torch.randn(size, d, generator=generator))


@torch.no_grad()
def write_answers(target: Target, path: Path, count: int = 60, tokens: int = 40) -> Path:
    """Greedy answers of the target to random prompts, as `peagle regenerate` writes them."""
    ids = torch.tensor(np.random.default_rng(0).integers(6, 96, (count, 4)))
    for _ in range(tokens):  # One token of all answers.
        newest = target.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, newest[:, None]], 1)
    with path.open("w") as file:
        for i, row in enumerate(ids.tolist()):
            record = {"key": f"{i}@0", "ids": row, "spans": [[4, 4 + tokens]]}
            file.write(json.dumps(record) + "\n")
    return path


def some_config(data: Path, out: Path, **changes: object) -> TrainConfig:
    values = {
        "target": "tiny",
        "data": str(data),
        "out": str(out),
        "layers": 1,
        "k": 5,
        "aux_layer_ids": AUX,
        "mask_token_id": MASK,
        "pack_tokens": 384,
        "steps": 12,
        "loss": "kl",
        "optimizer": "adamw",
        "lr": 3e-3,
        "held_out": 6,
        "eval_k": 4,
        "log_every": 1,
        "save_every": 4,
        "eval_every": 0,
        "init": "random",
    }
    return TrainConfig(**(values | changes))  # type: ignore[arg-type]


def make_run(target: Target, config: TrainConfig, world: World = World()) -> Trainer:  # noqa: B008
    return Trainer(config, target, load_training_data(config, target), world)


def train(trainer: Trainer, **more: float) -> list[dict]:
    """Train to the end or for `stop_after` seconds; return the records of the journal.

    The curves are not drawn, which would take a second.
    """
    journal = Journal(trainer.out, trainer.step, trainer.world.is_main)
    with patch("peagle.train.journal.draw_curves"):
        trainer.train(journal, lambda *_: None, **more)
    return [asdict(record) for record in journal.records]


@dataclass(frozen=True)
class Trained:
    target: Target
    drafter: Drafter  # loaded from its folder
    data: Path
    entries: list[dict]


@cache
def some_answers() -> tuple[Target, Path]:
    """A target and a folder with 40 of its answers."""
    target = make_target()
    return target, built_once(
        "answers", lambda folder: write_answers(target, folder / "answers.jsonl", 40, tokens=30)
    )


# Extensions of a plain drafter.
EXTENSIONS: dict[str, dict[str, int | bool]] = {
    "inject": {"inject": True},
    "bidirectional": {"bidirectional": True},
    "dependency": {"dependency": 8},
    "convolution": {"convolution": True},
    "refinement": {"refinement": 2},
    "all": {
        "inject": True,
        "bidirectional": True,
        "convolution": True,
        "refinement": 1,
        "dependency": 8,
        "confidence": True,
    },
}


# Extensions of EAGLE-3.
EAGLE3_EXTENSIONS: dict[str, dict[str, int | bool]] = {"norm_output": {"norm_output": True}}


def trained(method: Method, draft_vocab: int = 0, extension: str = "") -> Trained:
    """A tiny drafter with a meaningful acceptance length; trained once per run of the tests."""
    return _trained(method, draft_vocab, extension)


@cache
def _trained(method: Method, draft_vocab: int, extension: str) -> Trained:
    target, answers = some_answers()
    data = answers / "answers.jsonl"
    settings: dict[str, Any] = {
        "method": method,
        "draft_vocab": draft_vocab,
        "layers": 2,
        "steps": 30,
        "pack_tokens": 192,
    }
    settings |= {"init": "target", "save_every": 0} | (
        (EXTENSIONS | EAGLE3_EXTENSIONS)[extension] if extension else {}
    )

    def build(folder: Path) -> None:
        trainer = make_run(target, some_config(data, folder / "run", **settings))
        write_json(folder / "entries.json", train(trainer))

    folder = built_once(f"{method} {draft_vocab} {extension}", build)
    drafter = checkpoint.load(folder / "run" / "drafter", target, torch.float32)
    for parameter in drafter.dependency.parameters() if drafter.dependency else ():
        parameter.data.mul_(5)  # After a short training, corrections are small.
    return Trained(target, drafter, data, json.loads((folder / "entries.json").read_text()))


def prompts(count: int) -> list[list[int]]:
    """The prompts of `write_answers`."""
    return np.random.default_rng(0).integers(6, 96, (count, 4)).tolist()


def row_losses(
    normed: Tensor, teacher: Tensor, head: Tensor, kind: str, mix: float, softcap: float = 0.0
) -> Tensor:
    """The losses [R], by PyTorch's own functions on full logits."""
    teacher_logits = teacher @ head.T
    if softcap:
        teacher_logits = softcap * torch.tanh(teacher_logits / softcap)
    log_q = (normed @ head.T).log_softmax(-1)
    kl = kl_div(log_q, teacher_logits.softmax(-1), reduction="none").sum(-1)
    ce = cross_entropy(normed @ head.T, teacher_logits.argmax(-1), reduction="none")
    tv = (log_q.exp() - teacher_logits.softmax(-1)).abs().sum(-1) / 2
    kl_share = (3 * (tv - 1)).exp().detach()
    distances = {"tv": tv, "tvmix": tv, "lk": kl_share * kl + (1 - kl_share) * tv}
    share = {"kl": 1.0, "ce": 0.0, "tv": 1.0}.get(kind, mix)
    return share * distances.get(kind, kl) + (1 - share) * ce


SHORT_RUN = {"pack_tokens": 128, "k": 3, "steps": 8, "eval_k": 2, "held_out": 2, "save_every": 3}


def config_in(folder: Path, **changes: object) -> TrainConfig:
    return some_config(some_answers()[1] / "answers.jsonl", folder / "run", **(SHORT_RUN | changes))


def start(config: TrainConfig) -> Trainer:
    return make_run(some_answers()[0], config)

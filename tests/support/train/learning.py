"""A learn folder with answers of the tiny target, and the settings of its trainer."""

import json
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.learn.document import StoredDocument, new_document
from peagle.learn.folder import LearnFolder
from peagle.learn.settings import LearnerSettings
from peagle.learn.store import encode_line
from peagle.learn.training.round_settings import SETTINGS_FILE
from peagle.learn.training.teacher import Teacher, load_teacher
from tests.support.server.serving import tiny_folder, tiny_pair

QUICK: dict[str, Any] = {
    "min_documents": 20,
    "min_held_back": 5,
    "epochs": 8.0,
    "lr": 1e-2,
    "pack_tokens": 512,
    "k": 4,
    "nice": 0,
}


@cache
@torch.no_grad()
def answers(count: int = 60, tokens: int = 24) -> list[StoredDocument]:
    """Greedy answers of the tiny target to random prompts."""
    target = tiny_pair().target
    ids = torch.from_numpy(np.random.default_rng(0).integers(6, 90, (count, 4)))
    for _ in range(tokens):
        newest = target.model(input_ids=ids).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, newest[:, None]], 1)
    return [new_document(row[:4], cut_at_stop(row[4:])) for row in ids.tolist()]


def cut_at_stop(answer: list[int]) -> list[int]:
    stop = next((i for i, token in enumerate(answer) if token == 1), len(answer) - 1)
    return answer[: stop + 1]


def write_documents(folder: LearnFolder, documents: list[StoredDocument], time: float) -> None:
    """Append documents as an engine process does, stored from `time` on."""
    folder.documents.mkdir(parents=True, exist_ok=True)
    with (folder.documents / "test-00000001.jsonl").open("ab") as file:
        for number, document in enumerate(documents):
            file.write(encode_line(replace(document, time=time + number / 1000)))


def learner_settings(root: Path, **changes: Any) -> LearnerSettings:
    """The settings for the pair on disk in `root`."""
    folders = {"target": str(root / "target"), "drafter": str(root / "p-eagle")}
    return LearnerSettings(str(root / "target"), device="cpu", **folders | changes)


def make_folder(root: Path, teacher: Teacher, **settings: Any) -> LearnFolder:
    folder = LearnFolder(root)
    folder.open(teacher.identity)
    (folder.root / SETTINGS_FILE).write_text(json.dumps(QUICK | settings))
    return folder


@cache
def tiny_root() -> Path:
    """The tiny pair on disk, once per process."""
    return tiny_folder(Path(tempfile.mkdtemp()))


@cache
def tiny_teacher() -> Teacher:
    return load_teacher(learner_settings(tiny_root()))


def random_answers(count: int) -> list[StoredDocument]:
    """Documents that no drafter can predict."""
    rng = random.Random(1)
    ids = range(6, 90)
    return [new_document(rng.choices(ids, k=4), rng.choices(ids, k=20)) for _ in range(count)]

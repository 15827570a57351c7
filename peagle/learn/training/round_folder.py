"""RoundFolder: DIR/round, the documents and the state of the round in progress.

The documents of a round are chosen once and written down, so that a killed job resumes with the
same ones. The folder is removed when the candidate is judged. DIR/cursor.json then remembers the
newest document of the round.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from peagle.learn.document import StoredDocument, is_held_back
from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import read_documents
from peagle.learn.training.round_settings import RoundSettings
from peagle.paths import publish_folder, write_json


@dataclass(frozen=True, slots=True)
class RoundPlan:
    parent: int  # version that the round trains
    base: str  # digest of the drafter that the pair ships
    cursor: float  # time of the newest document
    documents: int  # to train on, without those of the replay folder
    tokens: int
    held_back: int  # documents


class RoundFolder:
    def __init__(self, folder: LearnFolder) -> None:
        self.folder = folder
        self.root = folder.root / "round"
        self.documents = self.root / "documents.jsonl"
        self.held_back = self.root / "held_back.jsonl"
        self.plan_file = self.root / "plan.json"
        self.cursor_file = folder.root / "cursor.json"

    def plan(self) -> RoundPlan | None:
        """The round in progress; None: there is none."""
        try:
            return RoundPlan(**json.loads(self.plan_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def create(self, parent: int, base: str, settings: RoundSettings) -> RoundPlan:
        """Choose the documents of a round: all new ones and a sample of older ones."""
        cursor = self.read_cursor()
        training: list[StoredDocument] = []
        held_back: list[StoredDocument] = []
        for document in read_documents(self.folder):
            (held_back if is_held_back(document.id) else training).append(document)
        chosen = choose_documents(training, cursor, settings)
        judging = sorted(held_back, key=lambda document: document.time)[-settings.max_held_back :]
        newest = max([cursor, *(document.time for document in training)])
        tokens = sum(document.tokens for document in chosen)
        plan = RoundPlan(parent, base, newest, len(chosen), tokens, len(judging))
        with publish_folder(self.root) as staging:
            write_records(staging / self.documents.name, chosen)
            write_records(staging / self.held_back.name, judging)
            write_json(staging / self.plan_file.name, asdict(plan))
        return plan

    def finish(self, plan: RoundPlan) -> None:
        """Forget the round; the next one begins behind its documents."""
        write_json(self.cursor_file, {"time": plan.cursor})
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def read_cursor(self) -> float:
        """The time of the newest document of the last round; 0: there was none."""
        try:
            return float(json.loads(self.cursor_file.read_text())["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0


def choose_documents(
    documents: list[StoredDocument], cursor: float, settings: RoundSettings
) -> list[StoredDocument]:
    """The newest documents first, then older ones in random order, up to `max_tokens`.

    New documents take at most half of the tokens if there are older ones: rounds that follow one
    another see the older traffic again.
    """
    unique = list({document.id: document for document in documents}.values())
    new = sorted((d for d in unique if d.time > cursor), key=lambda d: -d.time)
    old = [d for d in unique if d.time <= cursor]
    order = np.random.default_rng(settings.seed).permutation(len(old)).tolist()
    limit = settings.max_tokens
    chosen = take_tokens(new, limit // 2 if old else limit)
    rest = limit - sum(document.tokens for document in chosen)
    return chosen + take_tokens((old[i] for i in order), rest)


def take_tokens(documents: Iterable[StoredDocument], limit: int) -> list[StoredDocument]:
    """The first documents that have at most `limit` tokens together, one at least."""
    taken: list[StoredDocument] = []
    for document in documents:
        limit -= document.tokens
        if limit < 0 and taken:
            break
        taken.append(document)
    return taken


def write_records(path: Path, documents: Iterable[StoredDocument]) -> None:
    """Write documents as `train.data.documents` reads them; only the answer is trained on."""
    with path.open("w") as file:
        for document in documents:
            ids = document.prompt + document.answer
            span = [len(document.prompt), len(ids)]
            file.write(json.dumps({"key": document.id, "ids": ids, "spans": [span]}) + "\n")

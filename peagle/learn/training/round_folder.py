"""RoundFolder: DIR/round, the documents and the state of the round in progress.

The documents of a round are chosen once and written down, so that a killed job resumes with the
same ones. The folder is removed when the candidate is judged. DIR/cursor.json then remembers the
newest document of the round.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from peagle.learn.document import DocumentHeader, StoredDocument, is_held_back
from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import read_documents, read_headers
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

    def create(
        self, parent: int, base: str, settings: RoundSettings, max_length: int | None = None
    ) -> RoundPlan:
        """Choose the documents of a round: all new ones and a sample of older ones.

        `max_length`: tokens of a document that the trainer reads; see `cut_prompt`.
        """
        cursor = self.read_cursor()
        training: list[DocumentHeader] = []
        held_back: list[DocumentHeader] = []
        for header in read_headers(self.folder):
            (held_back if is_held_back(header.id) else training).append(header)
        chosen = choose_documents(training, cursor, settings)
        judging = choose_judging(held_back, settings.max_held_back)
        newest = max([cursor, *(header.time for header in training)])
        tokens = sum(header.tokens for header in chosen)
        plan = RoundPlan(parent, base, newest, len(chosen), tokens, len(judging))
        with publish_folder(self.root, private=True) as staging:
            write_records(staging / self.documents.name, self._read(chosen), max_length)
            write_records(staging / self.held_back.name, self._read(judging), max_length)
            write_json(staging / self.plan_file.name, asdict(plan))
        return plan

    def _read(self, headers: Iterable[DocumentHeader]) -> Iterator[StoredDocument]:
        """The documents of these headers, once each."""
        ids = {header.id for header in headers}
        for document in read_documents(self.folder):
            if document.id in ids:
                ids.remove(document.id)
                yield document

    def finish(self, plan: RoundPlan) -> None:
        """Forget the round; the next one begins behind its documents."""
        write_json(self.cursor_file, {"time": plan.cursor})
        self.discard()

    def discard(self) -> None:
        """Remove the round, and what a process that was killed has left of one."""
        for path in (self.root, *self.root.parent.glob(f".{self.root.name}.*")):
            shutil.rmtree(path, ignore_errors=True)

    def read_cursor(self) -> float:
        """The time of the newest document of the last round; 0: there was none."""
        try:
            return float(json.loads(self.cursor_file.read_text())["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0


def choose_documents(
    documents: list[DocumentHeader], cursor: float, settings: RoundSettings
) -> list[DocumentHeader]:
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


def choose_judging(documents: list[DocumentHeader], limit: int) -> list[DocumentHeader]:
    """The newest answers, one for each prompt.

    A prompt that comes again and again, as a health check's, must not decide alone: its answers
    are not independent, and the interval of the judge would be too narrow.
    """
    by_time = sorted(documents, key=lambda document: document.time)
    newest = {document.prompt_digest: document for document in by_time}
    return sorted(newest.values(), key=lambda document: document.time)[-limit:]


def take_tokens(documents: Iterable[DocumentHeader], limit: int) -> list[DocumentHeader]:
    """The first documents that have at most `limit` tokens together, one at least."""
    taken: list[DocumentHeader] = []
    for document in documents:
        limit -= document.tokens
        if limit < 0 and taken:
            break
        taken.append(document)
    return taken


def write_records(
    path: Path, documents: Iterable[StoredDocument], max_length: int | None = None
) -> None:
    """Write documents as `train.data.documents` reads them; only the answer is trained on."""
    with path.open("w") as file:
        for document in documents:
            prompt = cut_prompt(document, max_length) if max_length else document.prompt
            ids = prompt + document.answer
            span = [len(prompt), len(ids)]
            file.write(json.dumps({"key": document.id, "ids": ids, "spans": [span]}) + "\n")


def cut_prompt(document: StoredDocument, max_length: int) -> list[int]:
    """The end of a long prompt: the trainer cuts documents, and would see nothing of the answer.

    The answer keeps as much room as it needs, up to half of `max_length`.
    """
    room = max(max_length - len(document.answer), (max_length + 1) // 2)
    return document.prompt[-room:]

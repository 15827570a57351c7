"""Documents to train on: token ids and which of them the target wrote; and the order in which they are packed."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from peagle.data.chat import encode_conversation
from peagle.data.records import Report, ignore, read_records
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.pack import Pack, pack


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents side by side: document i is tokens starts[i]..starts[i + 1]."""

    ids: np.ndarray  # [tokens] int32
    answer: np.ndarray  # [tokens] bool
    starts: np.ndarray  # [documents + 1]
    keys: tuple[str, ...]
    numbers: np.ndarray  # [documents] among all that were read: a subset keeps them
    skipped: int = 0  # records without a document: dropped answers, misfits

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        at = slice(self.starts[i], self.starts[i + 1])
        return self.ids[at], self.answer[at]

    @property
    def answer_tokens(self) -> int:
        return int(self.answer.sum())

    @property
    def digest(self) -> str:
        """The same documents in the same order, or not?"""
        hashed = hashlib.sha256(json.dumps(self.keys).encode())
        for array in (self.ids, self.answer, self.starts):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()[:16]

    def subset(self, chosen: np.ndarray) -> "Documents":
        return join([(*self[i], self.keys[i]) for i in chosen], self.skipped, self.numbers[chosen])


def join(
    parts: list[tuple[np.ndarray, np.ndarray, str]],
    skipped: int = 0,
    numbers: np.ndarray | None = None,
) -> Documents:
    lengths = [len(ids) for ids, _, _ in parts]
    return Documents(
        ids=np.concatenate([ids for ids, _, _ in parts]).astype(np.int32)
        if parts
        else np.zeros(0, np.int32),
        answer=np.concatenate([answer for _, answer, _ in parts]).astype(bool)
        if parts
        else np.zeros(0, bool),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        keys=tuple(key for _, _, key in parts),
        numbers=np.arange(len(parts)) if numbers is None else numbers,
        skipped=skipped,
    )


def read_documents(
    paths: list[Path], target: Target, max_length: int, report: Report = ignore
) -> Documents:
    """From folders of `peagle regenerate`, or JSONL files of conversations (`messages`, or `ids` and `spans`).

    Longer documents are cut. A record that fits neither, or not the chat template, is reported and skipped.
    """
    parts: list[tuple[np.ndarray, np.ndarray, str]] = []
    skipped = 0
    for path in paths:
        path = path.expanduser()
        skipped += _read(
            path / "answers.jsonl" if path.is_dir() else path, target, max_length, report, parts
        )
    if not parts:
        names = ", ".join(map(str, paths))
        raise UserError(
            f"{names}: no answer to train on ({skipped} records skipped). Run `peagle regenerate` first"
        )
    return join(parts, skipped)


def _read(file: Path, target: Target, max_length: int, report: Report, parts: list) -> int:
    """Adds the file's documents to `parts` and tells how many records gave none."""
    skipped = 0
    for number, record in read_records(file, report):
        if "dropped" in record:
            skipped += 1
            continue
        try:
            ids, answer = document(record, target)
        except UserError:  # concerns every record
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            report(f"{file}:{number}: skipped, {error}")
            skipped += 1
            continue
        ids, answer = ids[:max_length], answer[:max_length]
        if answer[2:].any():
            parts.append((ids, answer, str(record.get("key", number))))
        else:
            skipped += 1
    return skipped


def document(record: dict, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """(ids, answer) of one record."""
    if "ids" in record:
        ids, spans = record["ids"], record["spans"]
    elif "messages" in record:
        ids, spans = encode_conversation(target, record["messages"])
    else:
        raise ValueError("a conversation has `messages`, or `ids` and `spans`")
    tokens = np.asarray(ids, dtype=np.int32)
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= target.vocab_size:
        raise ValueError(f"token ids outside the target's vocabulary of {target.vocab_size}")
    answer = np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        answer[start:end] = True
    return tokens, answer


def split(documents: Documents, held_out: int, seed: int) -> tuple[Documents, Documents]:
    """(to train on, held out): the same for the same seed; conversations about one prompt stay together."""
    if not held_out:
        return documents, documents.subset(np.arange(0))
    prompts = [key.split("@")[0] for key in documents.keys]
    names = sorted(set(prompts))
    chosen = set(
        np.random.default_rng(seed)
        .permutation(len(names))[: min(held_out, len(names) // 5)]
        .tolist()
    )
    out = {name for i, name in enumerate(names) if i in chosen}
    held = np.array([prompt in out for prompt in prompts])
    return documents.subset(np.flatnonzero(~held)), documents.subset(np.flatnonzero(held))


def epoch_order(documents: Documents, tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The documents of every pack of an epoch, shuffled."""
    return fill(documents, np.random.default_rng([seed, epoch]).permutation(len(documents)), tokens)


def fill(documents: Documents, order: np.ndarray, tokens: int) -> list[np.ndarray]:
    """The document numbers `order`, cut where a pack is full."""
    cuts, filled = [], 0
    for i, length in enumerate(np.diff(documents.starts)[order].tolist()):
        if filled and filled + length > tokens:
            cuts.append(i)
            filled = 0
        filled += length
    return np.split(order, cuts)


def steps(
    documents: Documents, tokens: int, packs_per_step: int, seed: int
) -> Iterator[list[np.ndarray]]:
    """Without end: the packs (as document numbers) of each step, epoch after epoch."""
    epoch = 0
    while True:
        order = epoch_order(documents, tokens, seed, epoch)
        for first in range(0, len(order), packs_per_step):
            yield order[first : first + packs_per_step]
        epoch += 1


def packed(documents: Documents, chosen: np.ndarray, tokens: int = 0) -> Pack:
    one = pack([documents[i] for i in chosen.tolist()], tokens)
    source = np.concatenate(
        [np.arange(documents.starts[i], documents.starts[i + 1]) for i in chosen.tolist()]
    )
    padding = np.zeros(len(one.ids) - len(source), dtype=np.int64)
    return replace(one, chosen=documents.numbers[chosen], source=np.append(source, padding))

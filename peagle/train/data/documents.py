"""Documents to train on, with the mask of the target's answers, and their order in packs."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peagle.data.chat import encode_conversation
from peagle.data.records import Report, ignore, read_records
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.pack import PackedDocuments, pack_sequences


class Document(NamedTuple):
    ids: np.ndarray  # [tokens]
    answer_mask: np.ndarray  # [tokens] bool: written by the target
    key: str  # PROMPT@TEMPERATURE for answers of `peagle regenerate`


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents side by side: document i is tokens starts[i]..starts[i + 1]."""

    ids: np.ndarray  # [tokens] int32
    answer_mask: np.ndarray  # [tokens] bool
    starts: np.ndarray  # [documents + 1]
    keys: tuple[str, ...]
    indices: np.ndarray  # [documents] index among all documents read; a subset keeps it
    skipped: int = 0  # records without a document: dropped answers and malformed records

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> Document:
        tokens = slice(self.starts[i], self.starts[i + 1])
        return Document(self.ids[tokens], self.answer_mask[tokens], self.keys[i])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def answer_tokens(self) -> int:
        return int(self.answer_mask.sum())

    @property
    def digest(self) -> str:
        """A hash of the documents and their order."""
        digest = hashlib.sha256(json.dumps(self.keys).encode())
        for array in (self.ids, self.answer_mask, self.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def subset(self, chosen: np.ndarray) -> "Documents":
        return join_documents([self[i] for i in chosen], self.skipped, self.indices[chosen])


def join_documents(
    documents: Sequence[Document], skipped: int = 0, indices: np.ndarray | None = None
) -> Documents:
    """Concatenate documents; `indices`, among all documents, are 0, 1, 2, ... by default."""
    ids = [np.zeros(0, np.int32), *(document.ids for document in documents)]
    masks = [np.zeros(0, bool), *(document.answer_mask for document in documents)]
    lengths = [len(document.ids) for document in documents]
    return Documents(
        ids=np.concatenate(ids).astype(np.int32),
        answer_mask=np.concatenate(masks).astype(bool),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        keys=tuple(document.key for document in documents),
        indices=np.arange(len(documents)) if indices is None else indices,
        skipped=skipped,
    )


def read_documents(
    paths: list[Path], target: Target, max_length: int, report: Report = ignore
) -> Documents:
    """Read folders of `peagle regenerate`, or JSONL files of conversations.

    A record holds `messages`, or `ids` and `spans`. Longer documents are cut to `max_length`
    tokens. A record that has neither form, or that the chat template rejects, is reported and
    skipped.
    """
    documents: list[Document] = []
    skipped = 0
    for path in paths:
        path = path.expanduser()
        file = path / "answers.jsonl" if path.is_dir() else path
        read, ignored = _read_file(file, target, max_length, report)
        documents += read
        skipped += ignored
    if not documents:
        names = ", ".join(map(str, paths))
        raise UserError(
            f"{names}: no answer to train on ({skipped} records skipped)."
            " Run `peagle regenerate` first"
        )
    return join_documents(documents, skipped)


def _read_file(
    file: Path, target: Target, max_length: int, report: Report
) -> tuple[list[Document], int]:
    """The documents of a file, and the number of records without one."""
    documents = []
    skipped = 0
    for number, record in read_records(file, report):
        if "dropped" in record:
            skipped += 1
            continue
        try:
            ids, answer_mask = encode_record(record, target)
        except UserError:  # It concerns every record.
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            report(f"{file}:{number}: skipped, {error}")
            skipped += 1
            continue
        key = str(record.get("key", number))
        document = Document(ids[:max_length], answer_mask[:max_length], key)
        if document.answer_mask[2:].any():  # Row p predicts token p + 2.
            documents.append(document)
        else:
            skipped += 1
    return documents, skipped


def encode_record(record: dict[str, Any], target: Target) -> tuple[np.ndarray, np.ndarray]:
    """The token ids and the answer mask of a JSON record."""
    if "ids" in record:
        ids, spans = record["ids"], record["spans"]
    elif "messages" in record:
        ids, spans = encode_conversation(target, record["messages"])
    else:
        raise ValueError("a conversation has `messages`, or `ids` and `spans`")
    tokens = np.asarray(ids, dtype=np.int32)
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= target.vocab_size:
        raise ValueError(f"token ids outside the target's vocabulary of {target.vocab_size}")
    answer_mask = np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        answer_mask[start:end] = True
    return tokens, answer_mask


def split_held_out(documents: Documents, held_out: int, seed: int) -> tuple[Documents, Documents]:
    """Split into training and held-out documents by `held_out` prompts, a fifth of them at most.

    The split depends on the seed and the keys alone. All answers to one prompt stay together.
    """
    if not held_out:
        return documents, documents.subset(np.arange(0))
    prompts = [key.split("@")[0] for key in documents.keys]
    names = sorted(set(prompts))
    order = np.random.default_rng(seed).permutation(len(names))
    chosen = {names[i] for i in order[: min(held_out, len(names) // 5)].tolist()}
    is_held_out = np.array([prompt in chosen for prompt in prompts])
    return (
        documents.subset(np.flatnonzero(~is_held_out)),
        documents.subset(np.flatnonzero(is_held_out)),
    )


def join_some(documents: Documents, fraction: float, max_length: int, seed: int) -> Documents:
    """Join a random fraction of the documents, one behind the other, to longer ones.

    Lengths are spread up to `max_length` as those of `peagle regenerate --long` are: evenly on a
    log scale, from the length of one document on.
    """
    rng = np.random.default_rng([seed, len(documents)])
    order = rng.permutation(len(documents))
    count = round(fraction * len(documents))
    groups: list[list[Document]] = []
    total = limit = 0
    for i in order[:count].tolist():
        document = documents[i]
        total += len(document.ids)
        if not groups or total > limit:
            groups.append([])
            total = len(document.ids)
            limit = int(total * (max_length / total) ** rng.random())
        groups[-1].append(document)
    kept = [documents[i] for i in sorted(order[count:].tolist())]
    return join_documents(kept + [merge_documents(group) for group in groups], documents.skipped)


def merge_documents(documents: Sequence[Document]) -> Document:
    """One document of several, under the key of the first."""
    ids, masks, keys = zip(*documents, strict=True)
    return Document(np.concatenate(ids), np.concatenate(masks), keys[0])


def epoch_packs(documents: Documents, pack_tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The document indices of every pack of an epoch, shuffled."""
    order = np.random.default_rng([seed, epoch]).permutation(len(documents))
    return split_into_packs(documents, order, pack_tokens)


def split_into_packs(documents: Documents, order: np.ndarray, pack_tokens: int) -> list[np.ndarray]:
    """Cut the document indices `order` wherever the next document does not fit the pack."""
    cuts = []
    filled = 0
    for i, length in enumerate(documents.lengths[order].tolist()):
        if filled and filled + length > pack_tokens:
            cuts.append(i)
            filled = 0
        filled += length
    return np.split(order, cuts)


def iterate_steps(
    documents: Documents, pack_tokens: int, packs_per_step: int, seed: int
) -> Iterator[list[np.ndarray]]:
    """The packs (as document indices) of each step, epoch after epoch without end."""
    epoch = 0
    while True:
        packs = epoch_packs(documents, pack_tokens, seed, epoch)
        for first in range(0, len(packs), packs_per_step):
            yield packs[first : first + packs_per_step]
        epoch += 1


def pack_documents(
    documents: Documents, chosen: np.ndarray, pack_tokens: int = 0
) -> PackedDocuments:
    """Pack some of the documents; the pack knows where its tokens come from."""
    packed = pack_sequences([documents[i][:2] for i in chosen.tolist()], pack_tokens)
    token_indices = np.concatenate(
        [np.arange(documents.starts[i], documents.starts[i + 1]) for i in chosen.tolist()]
    )
    padding = np.zeros(len(packed.ids) - len(token_indices), dtype=np.int64)
    return replace(
        packed,
        document_indices=documents.indices[chosen],
        token_indices=np.append(token_indices, padding),
    )

"""The files of a capture: their names, their records and the shards with the features.

capture.json              settings of the capture: target, taps, top-k, digest of the data, shards
target.json               the target's name, revision, stop ids and config
head.safetensors          its embeddings, lm_head (if not tied), final norm and last blocks
shard-00000.safetensors   whole documents: ids int32 [T], answer bool [T],
                          starts int64 [documents + 1], g bfloat16 [T, taps * d],
                          logits float16 [T, k] (log-probabilities of the most likely tokens, in
                          falling order) and tokens int32 [T, k], their ids in the whole
                          vocabulary; metadata: {"first": first document's index, "keys": [...]}
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import UserError
from peagle.train.data.documents import Document, Documents, join_documents

CAPTURE_FILE = "capture.json"
TARGET_FILE = "target.json"
HEAD_FILE = "head.safetensors"
FORMAT_VERSION = 1
RESUME_HINT = "run `peagle capture` again, it resumes"


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """capture.json: everything that the files depend on. Only the same capture is resumed."""

    version: int
    target: str
    revision: str | None
    dtype: str
    aux_layer_ids: list[int]
    top_k: int
    max_length: int
    precise: bool
    documents: int
    tokens: int
    data: str  # digest of the documents
    shards: int
    context: int | None = None  # for which the target's RoPE is frozen; None: it depends on none

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """target.json."""

    name: str
    revision: str | None
    stop_ids: list[int]
    mask_token_id: int | None  # of the pair
    layers: int
    blocks: int  # last blocks that are stored
    config: dict[str, Any]  # the target's config.json

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Shard(NamedTuple):
    """One shard; its tensors are memory-mapped."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


class StoredRows(NamedTuple):
    """The stored features of L tokens."""

    taps: Tensor  # [L, taps * d]
    logits: Tensor  # [L, k]
    tokens: Tensor  # [L, k]


class Shards:
    """All shards of a finished capture, memory-mapped: rows are read when they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        count = read_capture_record(folder).shards
        files = [folder / shard_name(i) for i in range(count)]
        if missing := [file for file in files if not file.is_file()]:
            raise UserError(
                f"the capture in {folder} lacks {len(missing)} of its {count} shards: {RESUME_HINT}"
            )
        self.shards = [read_shard(file) for file in files]
        # [shards] index of the first document
        self.first = np.array([shard.metadata["first"] for shard in self.shards])

    def documents(self, max_length: int) -> Documents:
        """All documents, cut to `max_length` tokens.

        Attention is causal, so the features of the first tokens are the same for a cut document.
        """
        documents = []
        indices = []
        for shard in self.shards:
            ids, answer_mask, starts = (
                shard.tensors[name].numpy() for name in ("ids", "answer", "starts")
            )
            for i, key in enumerate(shard.metadata["keys"]):
                tokens = slice(starts[i], min(starts[i] + max_length, starts[i + 1]))
                if answer_mask[tokens][2:].any():
                    documents.append(Document(ids[tokens], answer_mask[tokens], key))
                    indices.append(shard.metadata["first"] + i)
        return join_documents(documents, 0, np.array(indices, dtype=np.int64))

    def rows(self, index: int, length: int) -> StoredRows:
        """The first `length` rows of a document, as views of the files."""
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        tensors = self.shards[number].tensors
        start = int(tensors["starts"][index - self.first[number]])
        rows = slice(start, start + length)
        return StoredRows(tensors["g"][rows], tensors["logits"][rows], tensors["tokens"][rows])


def shard_name(i: int) -> str:
    return f"shard-{i:05d}.safetensors"


def read_shard(file: Path) -> Shard:
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = json.loads((handle.metadata() or {}).get("about", "{}"))
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            return Shard(tensors, metadata)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"cannot read {file} ({error}): remove it and {RESUME_HINT}") from error


def read_capture_record(folder: Path) -> CaptureRecord:
    values = _read_json(folder / CAPTURE_FILE)
    if values.get("version") != FORMAT_VERSION:
        raise UserError(
            f"{folder} has format version {values.get('version')}, but version {FORMAT_VERSION}"
            " is needed: capture again"
        )
    return _record(CaptureRecord, values, folder / CAPTURE_FILE)


def read_target_record(folder: Path) -> TargetRecord:
    return _record(TargetRecord, _read_json(folder / TARGET_FILE), folder / TARGET_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): {RESUME_HINT}") from error


def _record(kind: Any, values: dict[str, Any], path: Path) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"cannot read {path} ({error}): capture again") from error

"""Store features and the teacher's most likely tokens, for training without the target (shards.py).

Shards hold whole documents in their order, and the documents of a shard depend on the documents
alone: a stopped capture continues with the first missing shard and ends with the same files.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from peagle.errors import UserError
from peagle.paths import write_json
from peagle.target import Target, check_aux_layer_ids, default_aux_layer_ids
from peagle.train.data.documents import Documents, split_into_packs
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.packed_attention import supports_packed_attention
from peagle.train.features.shard_writer import CaptureSettings, shard_tensors, write_tensors
from peagle.train.features.shards import (
    CAPTURE_FILE,
    FORMAT_VERSION,
    HEAD_FILE,
    TARGET_FILE,
    CaptureRecord,
    read_capture_record,
    read_shard,
    shard_name,
)
from peagle.train.features.stored import describe_target, head_tensors

FREE_SPACE_FACTOR = 1.05  # of the size to write must be free
DOCUMENT_HEADER_BYTES = 20  # in a shard, for each document, beside its key
SHARD_HEADER_BYTES = 600

Progress = Callable[[int, int, int], None]  # tokens done, tokens in all, tokens done in this run


class Capture:
    """The shards to write and their size; `run` writes them."""

    def __init__(
        self, target: Target, documents: Documents, out: Path, settings: CaptureSettings
    ) -> None:
        self.target = target
        self.documents = documents
        self.settings = settings
        self.out = Path(out).expanduser()
        self.aux_layer_ids = settings.aux_layer_ids or default_aux_layer_ids(len(target.layers))
        check_aux_layer_ids(self.aux_layer_ids, len(target.layers))
        if not 1 <= settings.top_k <= target.vocab_size:
            raise UserError(
                f"`top_k` is {settings.top_k}: use 1 to {target.vocab_size}, the vocabulary's size"
            )
        shard_tokens = max(1, settings.shard_bytes // self.bytes_per_token)
        # the document indices of each shard
        self.parts = split_into_packs(documents, np.arange(len(documents)), shard_tokens)
        check_folder(self.out, self.record())
        self.missing = [i for i, part in enumerate(self.parts) if not self._exists(i, len(part))]
        # tokens that are still to be captured
        self.tokens = sum(int(documents.lengths[self.parts[i]].sum()) for i in self.missing)

    def record(self) -> CaptureRecord:
        return CaptureRecord(
            version=FORMAT_VERSION,
            target=self.target.name or "",
            revision=self.target.revision,
            dtype=str(self.target.dtype).removeprefix("torch."),
            aux_layer_ids=list(self.aux_layer_ids),
            top_k=self.settings.top_k,
            max_length=self.settings.max_length,
            precise=self.settings.precise,
            documents=len(self.documents),
            tokens=len(self.documents.ids),
            data=self.documents.digest,
            shards=len(self.parts),
            context=self.target.rope_context,
        )

    @property
    def bytes_per_token(self) -> int:
        width = len(self.aux_layer_ids) * self.target.hidden_size
        precise = self.settings.precise
        tap_bytes = 4 if precise else 2
        candidate_bytes = 8 if precise else 6  # a log-probability and an int32 id
        return width * tap_bytes + self.settings.top_k * candidate_bytes + 5  # id and answer mask

    @property
    def size(self) -> int:
        """Bytes that are still to be written."""
        headers = sum(
            DOCUMENT_HEADER_BYTES + len(self.documents.keys[i])
            for part in self.missing
            for i in self.parts[part].tolist()
        )
        head = 0
        if not (self.out / TARGET_FILE).is_file():
            head = sum(tensor.nbytes for tensor in head_tensors(self.target).values())
        shards = self.tokens * self.bytes_per_token + SHARD_HEADER_BYTES * len(self.missing)
        return shards + headers + head

    def free_bytes(self) -> int:
        folder = self.out.absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def check_free_space(self) -> None:
        needed = self.size * FREE_SPACE_FACTOR
        free = self.free_bytes()
        if needed > free:
            raise UserError(
                f"the capture in {self.out} needs {needed / 1e9:.2f} GB and"
                f" {free / 1e9:.2f} are free there: set `folder` to another disk, give fewer"
                " documents, lower `max_length` or `top_k`; or train without a capture"
            )

    def run(self, progress: Progress = lambda done, total, tokens: None) -> None:
        """Write the missing shards, each of them atomically. A stopped run can be repeated."""
        self.check_free_space()
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.out / ".lock", timeout=0):
                check_folder(self.out, self.record())
                self._write(progress)
        except Timeout as error:
            raise UserError(
                f"another job writes to {self.out}: wait for it, or give another `folder`"
            ) from error

    def _write(self, progress: Progress) -> None:
        for partial in self.out.glob(".*.safetensors.*"):
            partial.unlink()
        write_json(self.out / CAPTURE_FILE, self.record().as_dict())
        if not (self.out / TARGET_FILE).is_file():
            write_tensors(self.out / HEAD_FILE, head_tensors(self.target), {})
            write_json(self.out / TARGET_FILE, describe_target(self.target).as_dict())
        packed = self.target.device.type == "cuda" and supports_packed_attention(self.target)
        features = FeatureExtractor(self.target, self.aux_layer_ids, packed)
        done = 0

        def on_pack(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(done, self.tokens, done)

        for i in self.missing:
            documents = self.documents.subset(self.parts[i])
            tensors = shard_tensors(features, documents, self.settings, on_pack)
            metadata = {"first": int(self.parts[i][0]), "keys": documents.keys}
            write_tensors(self.out / shard_name(i), tensors, metadata)

    def _exists(self, i: int, count: int) -> bool:
        file = self.out / shard_name(i)
        return file.is_file() and len(read_shard(file).tensors["starts"]) == count + 1


def check_folder(folder: Path, record: CaptureRecord) -> None:
    """Refuse a folder that holds anything but this capture."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder")
    if not (folder / CAPTURE_FILE).is_file():
        if foreign := [file.name for file in folder.glob("[!.]*")]:
            raise UserError(
                f"{folder} holds {foreign[0]!r}, which is no part of a capture:"
                " give a new or an empty folder"
            )
        return
    before = read_capture_record(folder).as_dict()
    for name, value in record.as_dict().items():
        if before[name] != value:
            raise UserError(
                f"{folder} was begun with {name} {before[name]!r}, now it is {value!r}:"
                " continue with the former value, or give another `folder`"
            )

"""Store features and the teacher's most likely tokens, for training without the target (shards.py).

Shards hold whole documents in their order, and the documents of a shard depend on the documents
alone: a stopped capture continues with the first missing shard and ends with the same files.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn.functional import linear

from peagle.errors import UserError
from peagle.paths import save_tensors, write_json
from peagle.target import Target, check_aux_layer_ids, default_aux_layer_ids
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import Chains
from peagle.train.data.documents import Documents, pack_documents, split_into_packs
from peagle.train.data.pack import build_batch
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.packed_attention import supports_packed_attention
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
from peagle.train.features.teacher import soft_cap

PACK_TOKENS = 4096  # tokens that run through the target at once
MAX_LOGITS = 1 << 26  # logits that exist at once
FREE_SPACE_FACTOR = 1.05  # of the size to write must be free
DOCUMENT_HEADER_BYTES = 20  # in a shard, for each document, beside its key
SHARD_HEADER_BYTES = 600
NO_CHAINS = Chains(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

Progress = Callable[[int, int, int], None]  # tokens done, tokens in all, tokens done in this run


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    top_k: int = 64
    aux_layer_ids: tuple[int, ...] = ()  # empty: (2, L // 2, L - 3)
    max_length: int = 2048
    shard_bytes: int = 256 << 20
    precise: bool = False  # float32 throughout instead of bfloat16 and float16


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


def shard_tensors(
    features: FeatureExtractor,
    documents: Documents,
    settings: CaptureSettings,
    on_pack: Callable[[int], None],
) -> dict[str, Tensor]:
    """The tensors of a shard, computed pack by pack."""
    target = features.target
    size = len(documents.ids)
    k = settings.top_k
    tap_dtype = torch.float32 if settings.precise else torch.bfloat16
    logit_dtype = torch.float32 if settings.precise else torch.float16
    taps = torch.empty(size, len(target.aux_layer_ids) * target.hidden_size, dtype=tap_dtype)
    logits = torch.empty(size, k, dtype=logit_dtype)
    tokens = torch.empty(size, k, dtype=torch.int32)
    done = 0
    for chosen in split_into_packs(documents, np.arange(len(documents)), PACK_TOKENS):
        packed = pack_documents(documents, chosen, PACK_TOKENS)
        batch = flatten(build_batch(packed, NO_CHAINS)).to(target.device)
        pack_features = features(batch)
        last_hidden = pack_features.teacher
        assert isinstance(last_hidden, Tensor)
        total = sum(batch.lengths)
        rows = slice(done, done + total)
        done += total
        taps[rows] = pack_features.taps[:total]
        logits[rows], tokens[rows] = top_k_log_probs(
            last_hidden[:total], target.lm_head, k, features.softcap, logit_dtype
        )
        on_pack(total)
    return {
        "ids": torch.from_numpy(documents.ids),
        "answer": torch.from_numpy(documents.answer_mask),
        "starts": torch.from_numpy(documents.starts),
        "g": taps,
        "logits": logits,
        "tokens": tokens,
    }


@torch.no_grad()
def top_k_log_probs(
    last_hidden: Tensor, lm_head: Tensor, k: int, softcap: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """last_hidden [T, d] -> log-probabilities [T, k] of the most likely tokens, and their ids.

    Log-probabilities, because those of likely tokens are near 0, where 16 bits are precise.
    """
    values = []
    ids = []
    for part in last_hidden.split(max(1, MAX_LOGITS // len(lm_head))):
        logits = soft_cap(linear(part, lm_head).float(), softcap)
        best = logits.topk(k)
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        values.append(log_probs.clamp(min=-6e4).to(dtype).cpu())
        ids.append(best.indices.int().cpu())
    return torch.cat(values), torch.cat(ids)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write a safetensors file atomically: beside its place, then renamed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # One entry, because safetensors does not keep the order of several.
        save_tensors(stored, partial, {"about": json.dumps(metadata)})
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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

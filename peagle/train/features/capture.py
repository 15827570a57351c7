"""Features and the teacher's likeliest tokens, stored for training without the target (format: stored.py).

Shards hold whole documents in their order, and which document goes where depends on the documents alone: a capture
that was stopped goes on with the first shard that is missing, and ends with the same files.
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

from peagle.errors import UserError
from peagle.paths import save_tensors, write_json
from peagle.target import Target, check_aux_layer_ids, default_aux_layer_ids
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import Chains
from peagle.train.data.documents import Documents, fill, packed
from peagle.train.data.pack import batch_of
from peagle.train.features.features import Features, packable, top_k
from peagle.train.features.stored import (
    CAPTURE,
    HEAD,
    TARGET,
    VERSION,
    about_target,
    head_of,
    read_shard,
    read_told,
    shard_name,
)
from peagle.train.setup import pair_mask_id

PACK = 4096  # tokens that run through the target at once
SPARE = 1.05  # of the size that must be free
NO_CHAINS = Chains(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

Progress = Callable[[int, int, int], None]  # tokens done, tokens in all, tokens done in this run


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    top_k: int = 64
    aux_layer_ids: tuple[int, ...] = ()  # empty: (2, L // 2, L - 3)
    max_length: int = 2048
    shard_bytes: int = 256 << 20
    precise: bool = False  # float32 throughout instead of bfloat16 and float16: for tests


class Capture:
    """Which shards are to be written and how large they are; `run` writes them."""

    def __init__(
        self, target: Target, documents: Documents, out: Path, settings: CaptureSettings
    ) -> None:
        self.target, self.documents, self.settings = target, documents, settings
        self.out = Path(out).expanduser()
        self.aux = settings.aux_layer_ids or default_aux_layer_ids(len(target.layers))
        check_aux_layer_ids(self.aux, len(target.layers))
        if not 1 <= settings.top_k <= target.vocab_size:
            raise UserError(
                f"--top-k is {settings.top_k}: use 1 to {target.vocab_size}, the target's vocabulary"
            )
        room = max(1, settings.shard_bytes // self.bytes_per_token)
        self.parts = fill(
            documents, np.arange(len(documents)), room
        )  # the document numbers of each shard
        check_told(self.out, self.told())
        self.missing = [i for i, part in enumerate(self.parts) if not self._there(i, len(part))]
        lengths = np.diff(documents.starts)
        self.tokens = sum(
            int(lengths[self.parts[i]].sum()) for i in self.missing
        )  # still to be captured

    def told(self) -> dict[str, Any]:
        """What the files depend on: a capture is resumed only with the same."""
        return {
            "version": VERSION,
            "target": self.target.name,
            "revision": self.target.revision,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "aux_layer_ids": list(self.aux),
            "top_k": self.settings.top_k,
            "max_length": self.settings.max_length,
            "precise": self.settings.precise,
            "documents": len(self.documents),
            "tokens": len(self.documents.ids),
            "data": self.documents.digest,
            "shards": len(self.parts),
        }

    @property
    def bytes_per_token(self) -> int:
        taps, k, wide = (
            len(self.aux) * self.target.hidden_size,
            self.settings.top_k,
            self.settings.precise,
        )
        return taps * (4 if wide else 2) + k * (8 if wide else 6) + 5

    @property
    def size(self) -> int:
        """Bytes that are still to be written."""
        shards = sum(
            8 + 12 + len(self.documents.keys[i])
            for part in self.missing
            for i in self.parts[part].tolist()
        )
        head = (
            0
            if (self.out / TARGET).is_file()
            else sum(t.nbytes for t in head_of(self.target).values())
        )
        return self.tokens * self.bytes_per_token + shards + 600 * len(self.missing) + head

    def free_bytes(self) -> int:
        there = next(
            path for path in (self.out.absolute(), *self.out.absolute().parents) if path.exists()
        )
        return shutil.disk_usage(there).free

    def require_room(self) -> None:
        wanted, free = self.size * SPARE, self.free_bytes()
        if wanted > free:
            raise UserError(
                f"{self.out} would take {wanted / 1e9:.2f} GB, {free / 1e9:.2f} are free there: give another --out,"
                " fewer documents, a smaller --max-length or --top-k; or train without a capture"
            )

    def run(self, progress: Progress = lambda done, total, tokens: None) -> None:
        """Every shard appears whole; stopped at any point, it can be called again."""
        self.require_room()
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.out / ".lock", timeout=0):
                check_told(self.out, self.told())
                self._write(progress)
        except Timeout as error:
            raise UserError(
                f"another job writes to {self.out}: wait for it, or give another --out"
            ) from error

    def _write(self, progress: Progress) -> None:
        for torn in self.out.glob(".*.safetensors.*"):
            torn.unlink()
        write_json(self.out / CAPTURE, self.told())
        if not (self.out / TARGET).is_file():
            write_tensors(self.out / HEAD, head_of(self.target), {})
            write_json(
                self.out / TARGET, about_target(self.target, pair_mask_id(str(self.target.name)))
            )
        on_gpu, done = self.target.device.type == "cuda", 0
        features = Features(self.target, self.aux, packed=on_gpu and packable(self.target))

        def on_pack(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(done, self.tokens, done)

        for i in self.missing:
            documents = self.documents.subset(self.parts[i])
            tensors = shard_of(features, documents, self.settings, on_pack)
            about = {"first": int(self.parts[i][0]), "keys": documents.keys}
            write_tensors(self.out / shard_name(i), tensors, about)

    def _there(self, i: int, count: int) -> bool:
        file = self.out / shard_name(i)
        return file.is_file() and len(read_shard(file)[0]["starts"]) == count + 1


def shard_of(
    features: Features,
    documents: Documents,
    settings: CaptureSettings,
    on_pack: Callable[[int], None],
) -> dict[str, Tensor]:
    """Its tensors, filled pack by pack."""
    target, size, k = features.target, len(documents.ids), settings.top_k
    wide, narrow = (
        (torch.float32, torch.float32) if settings.precise else (torch.bfloat16, torch.float16)
    )
    g = torch.empty(size, len(target.aux_layer_ids) * target.hidden_size, dtype=wide)
    logits, tokens = torch.empty(size, k, dtype=narrow), torch.empty(size, k, dtype=torch.int32)
    done = 0
    for chosen in fill(documents, np.arange(len(documents)), PACK):
        batch = flatten(batch_of(packed(documents, chosen, PACK), NO_CHAINS)).to(target.device)
        taps, last = features(batch)
        total = sum(batch.lengths)
        at, done = slice(done, done + total), done + total
        g[at] = taps[:total]
        logits[at], tokens[at] = top_k(last[:total], target.lm_head, k, features.softcap, narrow)
        on_pack(total)
    ids, answer, starts = map(torch.from_numpy, (documents.ids, documents.answer, documents.starts))
    return {
        "ids": ids,
        "answer": answer,
        "starts": starts,
        "g": g,
        "logits": logits,
        "tokens": tokens,
    }


def write_tensors(final: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Written beside and renamed."""
    partial = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_tensors(
            stored, partial, {"about": json.dumps(about)}
        )  # one entry: their order is not kept
        partial.chmod(0o644)
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


def check_told(out: Path, told: dict[str, Any]) -> None:
    """A folder holds one capture."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder")
    if not (out / CAPTURE).is_file():
        if foreign := [file.name for file in out.glob("[!.]*")]:
            raise UserError(
                f"{out} holds {foreign[0]!r}, which is no part of a capture: give a new or an empty folder"
            )
        return
    before = read_told(out / CAPTURE)
    for name, value in told.items():
        if before.get(name) != value:
            raise UserError(
                f"{out} was begun with {name} {before.get(name)!r}, now it is {value!r}:"
                " go on with the former, or give another --out"
            )

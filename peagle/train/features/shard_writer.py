"""The tensors of a shard, computed with the target, and their files (format: shards.py)."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.paths import save_tensors
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import NO_CHAINS
from peagle.train.data.documents import Documents, pack_documents, split_into_packs
from peagle.train.data.pack import build_batch
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.teacher import soft_cap

PACK_TOKENS = 4096  # tokens that run through the target at once
MAX_LOGITS = 1 << 26  # logits that exist at once


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    top_k: int = 64
    aux_layer_ids: tuple[int, ...] = ()  # empty: (2, L // 2, L - 3)
    max_length: int = 2048
    shard_bytes: int = 256 << 20
    precise: bool = False  # float32 throughout instead of bfloat16 and float16


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

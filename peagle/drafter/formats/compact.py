"""Our own format: only what differs from the target.

config.json holds every field of DrafterConfig; model.safetensors the drafter's own tensors. Frozen embeddings and
lm_head rows stay with the target, a pruned vocabulary is `target_ids`, a learned mask embedding one row.
With "weights": "int8" in config.json matrices are stored as int8.py says; without that key, as they are.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import int8 as rows
from peagle.drafter.model import Drafter
from peagle.errors import UserError, nearest
from peagle.paths import checkpoint_folder, publish_folder, save_tensors, write_json
from peagle.target import Target

FORMAT = "peagle"
VERSION = 1
WEIGHTS = ("float", "int8")  # how matrices may be stored; "float" where config.json does not say


def is_compact(raw: dict[str, Any]) -> bool:
    return raw.get("format") == FORMAT


def save(
    drafter: Drafter,
    folder: Path,
    target: Target,
    dtype: torch.dtype | None = None,
    int8: bool = False,
) -> None:
    """Writes the folder whole or not at all.

    `int8`: matrices take a byte a weight (int8.py). `dtype`: what all other floating-point tensors are stored in.
    """
    tensors = _own(drafter, target)
    if int8:
        tensors = rows.pack(tensors, drafter.config.vocab_size)
    stored = {
        name: t.to(
            dtype if dtype and t.is_floating_point() and not name.endswith(rows.SCALE) else None,
            copy=True,
        )
        for name, t in tensors.items()
    }
    how = {"format": FORMAT, "format_version": VERSION} | ({"weights": "int8"} if int8 else {})
    with publish_folder(checkpoint_folder(folder)) as staging:
        save_tensors(
            {name: t.contiguous() for name, t in stored.items()}, staging / "model.safetensors"
        )
        write_json(staging / "config.json", how | asdict(drafter.config))


def _own(drafter: Drafter, target: Target) -> dict[str, Tensor]:
    """What the target does not have, on the CPU."""
    tensors = dict(drafter.state_dict())
    tensors.pop("embed_tokens", None)  # a parameter while it is trained
    if not _equal(drafter.embed_tokens, target.embedding):
        tensors["embed_tokens.weight"] = drafter.embed_tokens
    rows = target.lm_head if drafter.target_ids is None else target.lm_head[drafter.target_ids]
    if not _equal(drafter.lm_head, rows):
        tensors["lm_head.weight"] = drafter.lm_head
    if drafter.target_ids is not None:
        tensors["target_ids"] = drafter.target_ids.int()
    return {name: t.detach().cpu() for name, t in tensors.items()}


def config_from_json(raw: dict[str, Any]) -> DrafterConfig:
    if raw.get("format_version") != VERSION:
        raise UserError(
            f"this drafter has format version {raw.get('format_version')}, we read {VERSION}: update peagle"
        )
    if raw.get("weights", "float") not in WEIGHTS:
        raise UserError(
            f"this drafter's weights are stored as {raw['weights']!r}, we read {' and '.join(WEIGHTS)}: update peagle"
        )
    given = {
        key: value
        for key, value in raw.items()
        if key not in ("format", "format_version", "weights")
    }
    known = [f.name for f in fields(DrafterConfig)]
    for key in given:
        if key not in known:
            raise UserError(
                f"unknown key {key!r} in the drafter's config.json.{nearest(key, known)}"
            )
    for key in ("aux_layer_ids", "calibration"):
        if given.get(key) is not None:
            given[key] = tuple(given[key])
    try:
        return DrafterConfig(**given)
    except TypeError as error:
        raise UserError(f"the drafter's config.json is incomplete: {error}") from error


def unpacked(
    raw: dict[str, Any], config: DrafterConfig, stored: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The file's tensors by our names, whichever way config.json says they are stored."""
    return rows.unpack(stored, config.vocab_size) if raw.get("weights") == "int8" else stored


def complete(
    config: DrafterConfig, tensors: dict[str, Tensor], target: Target
) -> dict[str, Tensor]:
    """Adds what the target holds: embeddings and lm_head rows."""
    ids = tensors.get("target_ids")
    added = dict(tensors)
    if ids is not None:
        added["target_ids"] = ids = ids.long()
    if "embed_tokens.weight" not in added:
        added["embed_tokens.weight"] = target.embedding
    if "lm_head.weight" not in added:
        added["lm_head.weight"] = (
            target.lm_head if ids is None else target.lm_head[ids.to(target.device)]
        )
    if config.mask_token_id is not None and "mask_embedding" not in added:
        added["mask_embedding"] = target.embedding[config.mask_token_id]
    return added


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b.to(a.dtype)))

"""Our own checkpoint format, which stores only what differs from the target.

config.json has every field of DrafterConfig, model.safetensors the drafter's own tensors. Frozen
embeddings and lm_head rows are the target's and not stored. A pruned vocabulary is stored as
`target_ids`, a learned mask embedding as one row. With "weights": "int8" or "int4" in config.json,
matrices are stored as int8.py or int4.py describes; without that key, in floating point. An older
peagle refuses a value of "weights" that it does not know.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import int4, int8
from peagle.drafter.formats.row_format import RowFormat
from peagle.drafter.model import Drafter
from peagle.errors import UserError, did_you_mean
from peagle.kernels.stored_matrix import Table, dense, select_rows
from peagle.paths import checkpoint_folder, publish_folder, save_tensors, write_json
from peagle.target import Target

FORMAT = "peagle"
FORMAT_VERSION = 1
WEIGHT_FORMATS = ("float", "int8", "int4")  # "float" where config.json has no "weights"
FORMAT_KEYS = ("format", "format_version", "weights")  # keys beside those of DrafterConfig


def is_compact(raw: dict[str, Any]) -> bool:
    return raw.get("format") == FORMAT


def save(
    drafter: Drafter,
    folder: Path,
    target: Target,
    dtype: torch.dtype | None = None,
    rows: RowFormat | None = None,
) -> None:
    """Write the folder atomically: it appears complete or not at all.

    `rows` says in how many bits matrices are stored; None: in floating point. `dtype` is the type
    in which all other floating-point tensors are stored.
    """
    tensors = _own_tensors(drafter, target)
    if rows is not None:
        vocab_size = drafter.config.vocab_size
        if rows.bits == 4:
            tensors = int4.pack(tensors, vocab_size, rows)
        else:
            tensors = int8.pack(tensors, vocab_size)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        converts = tensor.is_floating_point() and not name.endswith(int8.SCALE)
        stored[name] = tensor.to(dtype if dtype and converts else None, copy=True).contiguous()
    header: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    if rows is not None:
        header["weights"] = rows.weights
    with publish_folder(checkpoint_folder(folder)) as staging:
        save_tensors(stored, staging / "model.safetensors")
        write_json(staging / "config.json", header | asdict(drafter.config))


def _own_tensors(drafter: Drafter, target: Target) -> dict[str, Tensor]:
    """The tensors that the target does not have, on the CPU."""
    tensors = dict(drafter.state_dict())
    tensors.pop("embed_tokens", None)  # a parameter while it is trained
    embeddings = dense(drafter.embed_table)
    if not _equal(embeddings, target.embedding):
        tensors["embed_tokens.weight"] = embeddings
    ids = drafter.target_ids
    head = dense(drafter.head_table)
    if not _equal(head, target.lm_head if ids is None else target.lm_head[ids]):
        tensors["lm_head.weight"] = head
    if ids is not None:
        tensors["target_ids"] = ids.int()
    return {name: t.detach().cpu() for name, t in tensors.items()}


def config_from_json(raw: dict[str, Any]) -> DrafterConfig:
    if raw.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"this drafter has format version {raw.get('format_version')}, but this peagle reads"
            f" version {FORMAT_VERSION}: update peagle"
        )
    if raw.get("weights", "float") not in WEIGHT_FORMATS:
        raise UserError(
            f"the weights of this drafter are stored as {raw['weights']!r}, but this peagle reads"
            f" {', '.join(WEIGHT_FORMATS)}: update peagle"
        )
    values = {key: value for key, value in raw.items() if key not in FORMAT_KEYS}
    known = [f.name for f in fields(DrafterConfig)]
    for key in values:
        if key not in known:
            raise UserError(
                f"unknown key {key!r} in the drafter's config.json.{did_you_mean(key, known)}"
            )
    for key in ("aux_layer_ids", "calibration"):
        if values.get(key) is not None:
            values[key] = tuple(values[key])
    try:
        return DrafterConfig(**values)
    except TypeError as error:
        raise UserError(f"the drafter's config.json is incomplete: {error}") from error


def unpack_tensors(
    raw: dict[str, Any], config: DrafterConfig, stored: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The file's tensors by our names, decoded if config.json says that they are int8 or int4."""
    weights = raw.get("weights")
    if weights == "int8":
        return int8.unpack(stored, config.vocab_size)
    if weights == "int4":
        return int4.unpack(stored, config.vocab_size)
    return stored


def add_target_tensors(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target: Target
) -> dict[str, Table]:
    """Add what the checkpoint leaves to the target: embeddings and lm_head rows."""
    ids = tensors.get("target_ids")
    complete: dict[str, Table] = dict(tensors)
    if ids is not None:
        complete["target_ids"] = ids = ids.long()
    if "embed_tokens.weight" not in complete:
        complete["embed_tokens.weight"] = target.embedding_table
    if "lm_head.weight" not in complete:
        head = target.head_table
        complete["lm_head.weight"] = (
            head if ids is None else select_rows(head, ids.to(target.device))
        )
    if config.mask_token_id is not None and "mask_embedding" not in complete:
        complete["mask_embedding"] = target.embed(config.mask_token_id)
    return complete


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b.to(a.dtype)))

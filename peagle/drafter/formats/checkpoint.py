"""Any drafter folder, read: ours, vLLM's native format (AWS's too), or speculators'."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.core import Format
from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import compact, speculators, vllm
from peagle.drafter.formats.llama import names_to_ours
from peagle.drafter.formats.tensors import build, own_shapes, read_json, read_tensors, shared_shapes
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.target import Target, default_aux_layer_ids


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    format: Format
    raw: dict[str, Any]  # config.json as it is
    config: DrafterConfig
    tensors: dict[str, Tensor]  # by our names
    stored: frozenset[str]  # the names in the file

    def problems(self) -> list[str]:
        """Missing, unexpected and mis-shaped tensors, a line each."""
        own, shared = own_shapes(self.config), shared_shapes(self.config)
        needed = own if self.format == "peagle" else own | shared
        if self.format == "peagle" and self.config.pruned:
            needed = needed | {"target_ids": shared["target_ids"]}
        lines = [f"tensor {name} is missing" for name in needed if name not in self.tensors]
        for name, tensor in self.tensors.items():
            shape = (own | shared).get(name)
            if shape is None:
                lines.append(f"tensor {name} is unexpected")
            elif tuple(tensor.shape) != shape:
                lines.append(
                    f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
                )
        ids = self.tensors.get("target_ids")
        if (
            ids is not None
            and ids.numel()
            and (
                ids.min() < 0 or ids.max() >= self.config.vocab_size or len(ids.unique()) < len(ids)
            )
        ):
            lines.append(
                "the draft vocabulary (d2t) points outside the target's vocabulary, or twice to one token"
            )
        return lines


def read(folder: Path) -> Checkpoint:
    folder = Path(folder)
    if not folder.is_dir():
        what = "it is a file, give its folder" if folder.exists() else "there is no such folder"
        raise UserError(f"no drafter in {folder}: {what}")
    raw, tensors = read_json(folder / "config.json"), read_tensors(folder)
    try:
        found = _parse(folder, raw, tensors)
        own_shapes(found.config)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"{folder / 'config.json'} cannot be understood ({error!r}): write the checkpoint again"
        ) from error
    return found


def _parse(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    stored = frozenset(tensors)
    if compact.is_compact(raw):
        config = compact.config_from_json(raw)
        return Checkpoint(
            folder, "peagle", raw, config, compact.unpacked(raw, config, tensors), stored
        )
    fc = next(
        (t for name, t in tensors.items() if name.endswith("fc.weight") and t.ndim == 2), None
    )
    width = None if fc is None else fc.shape[1]
    if speculators.is_speculators(raw):
        config = speculators.config_from_json(raw, width)
        return Checkpoint(
            folder, "speculators", raw, config, names_to_ours(tensors, config), stored
        )
    if vllm.is_vllm(raw):
        config = vllm.config_from_json(raw, width)
        return Checkpoint(folder, "vllm", raw, config, names_to_ours(tensors, config), stored)
    raise UserError(
        f"{folder} holds no drafter we know (model_type {raw.get('model_type')!r}):"
        " give a folder of `peagle export`, or one that vLLM serves as eagle3"
    )


def load(folder: Path, target: Target | None, dtype: torch.dtype | None = None) -> Drafter:
    """A drafter ready to draft. Without a target, a complete checkpoint (not ours) can still be loaded."""
    checkpoint = read(folder)
    config, tensors = checkpoint.config, checkpoint.tensors
    if target is not None:
        config.require_fit(target)
        if config.aux_layer_ids is None:
            config = replace(config, aux_layer_ids=default_aux_layer_ids(len(target.layers)))
        tensors = compact.complete(config, tensors, target)
    elif missing := [
        name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors
    ]:
        raise UserError(
            f"{folder} leaves {' and '.join(missing)} to its target {config.target!r}: give --target"
        )
    if problems := replace(checkpoint, config=config, tensors=tensors).problems():
        raise UserError(
            f"the drafter in {folder} is broken: {'; '.join(problems[:3])}. `peagle check` shows all"
        )
    kept = tensors["fc.weight"].dtype
    return build(config, tensors, dtype or kept, target.device if target else torch.device("cpu"))

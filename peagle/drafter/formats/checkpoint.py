"""Read a drafter folder of any format: our own, vLLM's native one (also AWS's), or speculators'."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.core import CheckpointFormat
from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import compact, speculators, vllm
from peagle.drafter.formats.llama import names_to_ours
from peagle.drafter.formats.tensors import (
    build_drafter,
    own_shapes,
    read_json,
    read_tensors,
    shared_shapes,
)
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.kernels.stored_matrix import Table, dense
from peagle.paths import require_drafter_folder
from peagle.target import Target, default_aux_layer_ids


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    format: CheckpointFormat
    raw: dict[str, Any]  # config.json, unchanged
    config: DrafterConfig
    tensors: Mapping[str, Table]  # by our names
    stored: frozenset[str]  # tensor names in the file

    def problems(self) -> list[str]:
        """List missing, unexpected and misshaped tensors and invalid token ids, one line each."""
        own = own_shapes(self.config)
        shared = shared_shapes(self.config)
        required = own if self.format == "peagle" else own | shared
        if self.format == "peagle" and self.config.pruned:
            required = required | {"target_ids": shared["target_ids"]}
        lines = [f"tensor {name} is missing" for name in required if name not in self.tensors]
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
            isinstance(ids, Tensor)
            and ids.numel()
            and not is_injective(ids, self.config.vocab_size)
        ):
            lines.append(
                "the draft vocabulary (d2t) names tokens outside the target's vocabulary,"
                " or names a token twice"
            )
        return lines


def is_injective(ids: Tensor, vocab_size: int) -> bool:
    """Whether every id is in the vocabulary and none occurs twice."""
    in_range = bool(ids.min() >= 0 and ids.max() < vocab_size)
    return in_range and len(ids.unique()) == len(ids)


def read(folder: Path) -> Checkpoint:
    """Read a folder without checking its tensors: see `Checkpoint.problems`."""
    folder = Path(folder)
    require_drafter_folder(folder)
    raw = read_json(folder / "config.json")
    tensors = read_tensors(folder)
    try:
        checkpoint = _parse(folder, raw, tensors)
        own_shapes(checkpoint.config)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"{folder / 'config.json'} is not a valid drafter configuration ({error!r}):"
            " write the checkpoint again"
        ) from error
    return checkpoint


def _parse(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    stored = frozenset(tensors)
    format: CheckpointFormat
    if compact.is_compact(raw):
        config = compact.config_from_json(raw)
        unpacked = compact.unpack_tensors(raw, config, tensors)
        return Checkpoint(folder, "peagle", raw, config, unpacked, stored)
    if speculators.is_speculators(raw):
        format = "speculators"
        config = speculators.config_from_json(raw, _fc_input_size(tensors))
    elif vllm.is_vllm(raw):
        format = "vllm"
        config = vllm.config_from_json(raw, _fc_input_size(tensors))
    else:
        raise UserError(
            f"{folder} has no known drafter format (model_type {raw.get('model_type')!r}):"
            " give a folder of `peagle export`, or one that vLLM serves as eagle3"
        )
    return Checkpoint(folder, format, raw, config, names_to_ours(tensors, config), stored)


def _fc_input_size(tensors: dict[str, Tensor]) -> int | None:
    for name, tensor in tensors.items():
        if name.endswith("fc.weight") and tensor.ndim == 2:
            return tensor.shape[1]
    return None


def load(folder: Path, target: Target | None, dtype: torch.dtype | None = None) -> Drafter:
    """Load a drafter that is ready to draft. Only our own format needs the target for that."""
    checkpoint = read(folder)
    config = checkpoint.config
    own = {name: dense(tensor) for name, tensor in checkpoint.tensors.items()}
    tensors: Mapping[str, Table] = own
    if target is not None:
        config.require_fit(target)
        if config.aux_layer_ids is None:
            config = replace(config, aux_layer_ids=default_aux_layer_ids(len(target.layers)))
        tensors = compact.add_target_tensors(config, own, target)
    elif missing := [
        name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors
    ]:
        raise UserError(
            f"{folder} does not store {' and '.join(missing)}, which its target {config.target!r}"
            " has: give `target`"
        )
    if problems := replace(checkpoint, config=config, tensors=tensors).problems():
        raise UserError(
            f"the drafter in {folder} is broken: {'; '.join(problems[:3])}."
            " `peagle check` shows all problems"
        )
    device = target.device if target else torch.device("cpu")
    context = target.context if target else None
    # Beside weights as stored, the drafter's own matrices take as few bytes as on other targets.
    matrix_dtype = torch.bfloat16 if target is not None and target.stored_format else None
    dtype = dtype or own["fc.weight"].dtype
    return build_drafter(config, tensors, dtype, device, context, matrix_dtype)

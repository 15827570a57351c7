"""What a run needs before its first step: documents, a drafter to train, the teacher."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.catalog import find
from peagle.data.records import Report, ignore
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.untrained import untrained
from peagle.errors import UserError
from peagle.target import Target, default_aux_layer_ids
from peagle.train.config import TrainConfig
from peagle.train.documents import Documents, read_documents, split
from peagle.train.vocabulary import draft_vocabulary


@dataclass(frozen=True, slots=True)
class Material:
    documents: Documents
    held_out: Documents
    target_ids: Tensor | None  # the draft vocabulary
    coverage: float  # share of the answers' tokens in it


def material_of(config: TrainConfig, target: Target, report: Report = ignore) -> Material:
    if not config.data:
        raise UserError("no data: give `data`, a folder of `peagle regenerate` or a JSONL file of conversations")
    paths = [Path(part.strip()) for part in config.data.split(",")]
    documents = read_documents(paths, target, min(config.max_length, target.context), report)
    train, held_out = split(documents, config.held_out, config.seed)
    ids, coverage = draft_vocabulary(train, target.vocab_size, config.draft_vocab, target.stop_ids)
    return Material(train, held_out, ids, coverage)


def new_drafter(config: TrainConfig, target: Target, target_ids: Tensor | None) -> Drafter:
    """Float32, ready to be trained."""
    drafter_config = config_for(
        target,
        config.method,
        config.num_layers,
        config.aux_layer_ids or default_aux_layer_ids(len(target.layers)),
        mask_id_of(config, target),
        None if target_ids is None else len(target_ids),
        k_trained=config.k,
        trained=False,
    )
    ids = None if target_ids is None else target_ids.to(target.device)
    drafter = untrained(drafter_config, target, config.seed, ids).float()
    drafter.adopt(target.embedding, target.lm_head, ids)  # the target's own tensors, in its dtype
    if config.init == "target":
        begin_as_target(drafter, target)
    if config.train_embeddings:
        drafter.own_embeddings()
    return drafter.train().requires_grad_(True)


def mask_id_of(config: TrainConfig, target: Target) -> int | None:
    if config.method != "p-eagle":
        return None
    if config.mask_token_id >= 0:
        return config.mask_token_id
    source = find(config.target).drafters.get("p-eagle")
    known = source.mask_token_id if source else None
    return target.vocab_size - 1 if known is None else known


@torch.no_grad()
def begin_as_target(drafter: Drafter, target: Target) -> None:
    """The drafter's blocks start as the target's last ones, fc as a copy of the last tap: it already speaks the
    language lm_head reads. What has another shape or name keeps its random start."""
    if "gemma" in target.config.model_type:  # its norms multiply by 1 + weight
        return
    count, d = len(drafter.layers), drafter.config.hidden_size
    for block, layer in zip(drafter.layers, target.layers[-count:], strict=True):
        theirs = dict(layer.named_parameters())
        for name, own in block.named_parameters():
            source = theirs.get(name.replace("hidden_norm", "input_layernorm"))
            if source is None:
                continue
            if own.shape == source.shape:
                own.copy_(source)
            elif own.ndim == 2 and own.shape[1] == 2 * source.shape[1] and own.shape[0] == source.shape[0]:
                own[:, source.shape[1] :] = source  # layer 0 reads [embedding, hidden]
    if drafter.fc.weight.shape == (d, drafter.config.num_taps * d):
        drafter.fc.weight[:, -d:] += torch.eye(d, device=drafter.fc.weight.device)
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    if getattr(norm, "weight", torch.empty(0)).shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(norm.weight)


def trained_copy(drafter: Drafter, state: dict[str, Any], target: Target) -> Drafter:
    """A drafter with the weights of a state, marked as trained, apart from the one in training."""
    copy = Drafter(replace(drafter.config, trained=True))
    copy.adopt(target.embedding, target.lm_head, drafter.target_ids)
    own = {name.removeprefix("drafter."): tensor for name, tensor in state.items()}
    if "embed_tokens" in own:
        copy.embed_tokens = own.pop("embed_tokens").to(target.dtype)
    copy.load_state_dict(own)
    return copy.to(target.device).eval().requires_grad_(False)

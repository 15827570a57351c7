"""What a run needs before its first step: documents, a drafter to train, the teacher."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.data.records import Report, ignore
from peagle.drafter import Drafter
from peagle.drafter.config import DrafterConfig, config_for
from peagle.drafter.formats import checkpoint
from peagle.drafter.untrained import untrained_drafter
from peagle.errors import UserError
from peagle.target import Target, default_aux_layer_ids
from peagle.train.config import TrainConfig
from peagle.train.data.documents import Documents, read_documents, split
from peagle.train.data.vocabulary import draft_vocabulary
from peagle.train.features.stored import CAPTURE, TARGET, StoredTarget, read_told

# of a drafter one begins as
MAY_DIFFER = (
    "draft_vocab_size",
    "k_trained",
    "trained",
    "target",
    "target_revision",
    "bidirectional",
    "calibration",
)
MAY_LACK = ("inject", "dependency", "confidence")


@dataclass(frozen=True, slots=True)
class Material:
    documents: Documents
    held_out: Documents
    target_ids: Tensor | None  # the draft vocabulary
    coverage: float  # share of the answers' tokens in it


def material_of(config: TrainConfig, target: Target, report: Report = ignore) -> Material:
    if not config.data:
        raise UserError(
            "no data: give `data`, a folder of `peagle regenerate` or a JSONL file of conversations"
        )
    length = min(config.max_length, target.context)
    if isinstance(target, StoredTarget):
        documents = target.shards.documents(length)
    else:
        paths = [Path(part.strip()) for part in config.data.split(",")]
        documents = read_documents(paths, target, length, report)
    train, held_out = split(documents, config.held_out, config.seed)
    ids, coverage = draft_vocabulary(train, target.vocab_size, config.draft_vocab, target.stop_ids)
    return Material(train, held_out, ids, coverage)


def capture_in(data: str) -> Path | None:
    """The folder of a capture, where `data` names one."""
    paths = [Path(part.strip()).expanduser() for part in data.split(",") if part.strip()]
    found = [path for path in paths if (path / CAPTURE).is_file()]
    if found and len(paths) > 1:
        raise UserError(
            f"{found[0]} is a capture, which is trained from alone: give it as the only `data`,"
            " or capture all data folders into one (`peagle capture --data A,B`)"
        )
    return found[0] if found else None


def fitted(config: TrainConfig) -> TrainConfig:
    """The config with what a capture decides, if its data is one: the target, the taps."""
    folder = capture_in(config.data)
    if folder is None:
        return config
    told, ids = read_told(folder / TARGET), tuple(read_told(folder / CAPTURE)["aux_layer_ids"])
    if not set(config.aux_layer_ids) <= set(ids):
        raise UserError(
            f"aux_layer_ids are {config.aux_layer_ids}, but {folder} holds those of {ids}: use these"
        )
    if (
        config.target not in (DEFAULT_PAIR, told["name"])
        and hub_name(config.target) != told["name"]
    ):
        raise UserError(
            f"{folder} was captured from {told['name']}, not from {config.target}: set target to that"
        )
    if config.init == "target" and config.num_layers > (kept := told["blocks"]):
        raise UserError(
            f"{folder} holds the target's last {kept} blocks, layers is {config.num_layers}: init=random"
        )
    return replace(config, target=told["name"], aux_layer_ids=config.aux_layer_ids or ids)


def hub_name(target: str) -> str:
    try:
        pair = find_pair(target)
    except UserError:
        return target
    return pair.target.hub or pair.name


def new_drafter(config: TrainConfig, target: Target, target_ids: Tensor | None) -> Drafter:
    """Float32, ready to be trained."""
    drafter_config = config_for(
        target,
        config.method,
        config.num_layers,
        config.aux_layer_ids or default_aux_layer_ids(len(target.layers)),
        mask_id_of(config, target),
        None if target_ids is None else len(target_ids),
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        inject=config.inject,
        bidirectional=config.bidirectional,
        dependency=config.dependency,
        confidence=config.confidence,
        k_trained=config.k,
        trained=False,
    )
    ids = None if target_ids is None else target_ids.to(target.device)
    drafter = untrained_drafter(drafter_config, target, config.seed, ids).float()
    drafter.set_embed_and_head(
        target.embedding, target.lm_head, ids
    )  # the target's own tensors, in its dtype
    if config.init == "target":
        begin_as_target(drafter, target)
    elif config.init != "random":
        begin_as(drafter, Path(config.init), target)
    if config.train_embeddings:
        drafter.make_embeddings_trainable()
    drafter.train().requires_grad_(not config.freeze)
    for part in filter(None, (drafter.dependency, drafter.confidence)):
        part.requires_grad_(True)
    return drafter


def mask_id_of(config: TrainConfig, target: Target) -> int | None:
    if config.method != "p-eagle":
        return None
    if config.mask_token_id >= 0:
        return config.mask_token_id
    known = (
        target.mask_token_id if isinstance(target, StoredTarget) else pair_mask_id(config.target)
    )
    return target.vocab_size - 1 if known is None else known


def pair_mask_id(pair: str) -> int | None:
    """None: no pair of ours."""
    try:
        source = find_pair(pair).drafters.get("p-eagle")
    except UserError:
        return None
    return source.mask_token_id if source else None


@torch.no_grad()
def begin_as_target(drafter: Drafter, target: Target) -> None:
    """The drafter's blocks start as the target's last ones, fc as a copy of the last tap: it already speaks the
    language lm_head reads. What has another shape or name keeps its random start."""
    if "gemma" in target.config.model_type:  # its norms multiply by 1 + weight
        return
    count, d = len(drafter.layers), drafter.config.hidden_size
    if count > len(target.layers):
        raise UserError(
            f"the target has {len(target.layers)} layers, the drafter {count}: use init = random"
        )
    for block, layer in zip(drafter.layers, target.layers[-count:], strict=True):
        theirs = dict(layer.named_parameters())
        for name, own in block.named_parameters():
            source = theirs.get(name.replace("hidden_norm", "input_layernorm"))
            if source is None:
                continue
            if own.shape == source.shape:
                own.copy_(source)
            elif (
                own.ndim == 2
                and own.shape[1] == 2 * source.shape[1]
                and own.shape[0] == source.shape[0]
            ):
                own[:, source.shape[1] :] = source  # layer 0 reads [embedding, hidden]
    if drafter.fc.weight.shape == (d, drafter.config.num_taps * d):
        drafter.fc.weight[:, -d:] += torch.eye(d, device=drafter.fc.weight.device)
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    if getattr(norm, "weight", torch.empty(0)).shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(norm.weight)


def begin_as(drafter: Drafter, folder: Path, target: Target) -> None:
    """The weights of an earlier drafter of the same shape; its draft vocabulary may have been another, and it may
    lack what a plain drafter lacks."""
    earlier = checkpoint.load(folder.expanduser(), target, torch.float32)
    for f in fields(DrafterConfig):
        mine, theirs = getattr(drafter.config, f.name), getattr(earlier.config, f.name)
        if f.name not in MAY_DIFFER and mine != theirs and not (f.name in MAY_LACK and not theirs):
            raise UserError(
                f"cannot begin as {folder}: its {f.name} is {theirs}, this run's is {mine}"
            )
    drafter.load_state_dict(drafter.state_dict() | earlier.state_dict())
    drafter.embed_tokens = earlier.embed_tokens.to(
        target.dtype
    )  # the target's, or the ones it had learned


def trained_copy(drafter: Drafter, state: dict[str, Any], target: Target) -> Drafter:
    """A drafter with the weights of a state, marked as trained, apart from the one in training."""
    copy = Drafter(replace(drafter.config, trained=True))
    copy.set_embed_and_head(drafter.embed_tokens, target.lm_head, drafter.target_ids)
    own = {name.removeprefix("drafter."): tensor for name, tensor in state.items()}
    if "embed_tokens" in own:
        copy.embed_tokens = own.pop("embed_tokens").to(target.dtype)
    copy.load_state_dict(own)
    return copy.to(target.device).eval().requires_grad_(False)

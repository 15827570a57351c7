"""The drafter that a run trains, and its initial weights."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.drafter.config import DrafterConfig, config_for
from peagle.drafter.formats import checkpoint
from peagle.drafter.untrained import untrained_drafter
from peagle.errors import UserError
from peagle.target import Target, default_aux_layer_ids
from peagle.train.config import TrainConfig
from peagle.train.features.stored import StoredTarget, pair_mask_token_id

# Config fields of an earlier drafter that may differ from those of the new one.
MAY_DIFFER = (
    "draft_vocab_size",
    "k_trained",
    "trained",
    "target",
    "target_revision",
    "bidirectional",
    "sliding_window",
    "calibration",
)
# Parts that an earlier drafter may lack.
MAY_LACK = ("inject", "dependency", "confidence", "convolution", "refinement")


def new_drafter(config: TrainConfig, target: Target, target_ids: Tensor | None) -> Drafter:
    """A float32 drafter, ready to be trained; `target_ids` is the draft vocabulary."""
    drafter_config = config_for(
        target,
        config.method,
        config.num_layers,
        config.aux_layer_ids or default_aux_layer_ids(len(target.layers)),
        choose_mask_token_id(config, target),
        None if target_ids is None else len(target_ids),
        config.intermediate_size or None,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        inject=config.inject,
        bidirectional=config.bidirectional,
        convolution=config.convolution,
        refinement=config.refinement,
        sliding_window=config.window,
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
        init_from_target(drafter, target)
    elif config.init != "random":
        init_from_drafter(drafter, Path(config.init), target)
    if config.train_embeddings:
        drafter.make_embeddings_trainable()
    drafter.train().requires_grad_(not config.freeze)
    for part in filter(None, (drafter.refinement, drafter.dependency, drafter.confidence)):
        part.requires_grad_(True)
    return drafter


def inherit_window(config: TrainConfig) -> TrainConfig:
    """The config with the sliding window of the drafter that it continues, unless it has one."""
    if config.sliding_window or not config.continues:
        return config
    window = checkpoint.read(Path(config.init).expanduser()).config.sliding_window
    return replace(config, sliding_window=window or 0)


def choose_mask_token_id(config: TrainConfig, target: Target) -> int | None:
    """The mask token id of the config, the pair's, or the last vocabulary row; None for EAGLE-3."""
    if config.method != "p-eagle":
        return None
    if config.mask_token_id >= 0:
        return config.mask_token_id
    if isinstance(target, StoredTarget):
        known = target.mask_token_id
    else:
        known = pair_mask_token_id(config.target)
    return target.vocab_size - 1 if known is None else known


@torch.no_grad()
def init_from_target(drafter: Drafter, target: Target) -> None:
    """Copy the target's last blocks and its norm; fc begins by adding the last tap.

    The drafter then already produces states that lm_head can read. A narrower MLP gets the channels
    with the largest weights. Weights of another shape or name keep their random values.
    """
    if "gemma" in target.config.model_type:  # Its norms multiply by 1 + weight.
        return
    count = len(drafter.layers)
    d = drafter.config.hidden_size
    if count > len(target.layers):
        raise UserError(
            f"the target has {len(target.layers)} layers, the drafter {count}: use init = random"
        )
    for block, layer in zip(drafter.layers, target.layers[-count:], strict=True):
        _copy_block(block, layer)
    if drafter.fc.weight.shape == (d, drafter.config.num_taps * d):
        drafter.fc.weight[:, -d:] += torch.eye(d, device=drafter.fc.weight.device)
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    if getattr(norm, "weight", torch.empty(0)).shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(norm.weight)


def _copy_block(block: Any, layer: torch.nn.Module) -> None:
    """Copy a decoder layer of the target into a block of the drafter, where shapes allow."""
    layer_weights = dict(layer.named_parameters())
    for name, weight in block.named_parameters():
        source = layer_weights.get(name.replace("hidden_norm", "input_layernorm"))
        if source is None:
            continue
        if weight.shape == source.shape:
            weight.copy_(source)
        elif weight.ndim == 2 and weight.shape == (source.shape[0], 2 * source.shape[1]):
            weight[:, source.shape[1] :] = source  # Layer 0 reads [embedding, hidden].
    _copy_channels(block.mlp, getattr(layer, "mlp", None))


def _copy_channels(mlp: Any, source: Any) -> None:
    """Copy the channels of a wider MLP that have the largest product of norms."""
    projections = ("gate_proj", "up_proj", "down_proj")
    found = (getattr(getattr(source, name, None), "weight", None) for name in projections)
    weights: list[Tensor] = [weight for weight in found if weight is not None]
    if [weight.ndim for weight in weights] != [2, 2, 2]:
        return
    gate, up, down = weights
    d, width = mlp.down_proj.weight.shape
    if len(down) != d or width >= len(gate):
        return
    size = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    channels = size.topk(width).indices.sort().values
    mlp.gate_proj.weight.copy_(gate[channels])
    mlp.up_proj.weight.copy_(up[channels])
    mlp.down_proj.weight.copy_(down[:, channels])


def init_from_drafter(drafter: Drafter, folder: Path, target: Target) -> None:
    """Copy the weights of an earlier drafter of the same shape.

    Its draft vocabulary may be another one, and it may lack the parts in MAY_LACK.
    """
    earlier = checkpoint.load(folder.expanduser(), target, torch.float32)
    for field in fields(DrafterConfig):
        name = field.name
        new = getattr(drafter.config, name)
        old = getattr(earlier.config, name)
        # Any number of passes of a refinement has the same weights.
        is_compatible = not old if name in MAY_LACK else name in MAY_DIFFER
        is_compatible |= name == "refinement" and bool(old and new)
        if new != old and not is_compatible:
            raise UserError(
                f"cannot initialize from {folder}: its {name} is {old}, this run's is {new}"
            )
    drafter.load_state_dict(drafter.state_dict() | earlier.state_dict())
    # The target's embeddings, or the ones that the earlier drafter has learned.
    drafter.embed_tokens = earlier.embed_tokens.to(target.dtype)


def continue_drafter(folder: Path, target: Target) -> Drafter:
    """The float32 drafter of a folder, ready to be trained; its config stays as it is."""
    drafter = checkpoint.load(folder.expanduser(), target, torch.float32)
    ids = drafter.target_ids
    head = target.lm_head if ids is None else target.lm_head[ids]
    if not torch.equal(drafter.lm_head, head.float()):
        raise UserError(
            f"the drafter in {folder} has an lm_head of its own: training needs the target's"
        )
    drafter.set_embed_and_head(drafter.embed_tokens.to(target.dtype), target.lm_head, ids)
    return drafter.train().requires_grad_(True)


def trained_copy(drafter: Drafter, state: dict[str, Any], target: Target) -> Drafter:
    """A drafter with the weights of a state, marked as trained, apart from the one in training."""
    copy = Drafter(replace(drafter.config, trained=True), drafter.context)
    copy.set_embed_and_head(drafter.embed_tokens, target.lm_head, drafter.target_ids)
    weights = {name.removeprefix("drafter."): tensor for name, tensor in state.items()}
    if "embed_tokens" in weights:
        copy.embed_tokens = weights.pop("embed_tokens").to(target.dtype)
    copy.load_state_dict(weights)
    return copy.to(target.device).eval().requires_grad_(False)

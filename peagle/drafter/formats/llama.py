"""What both of vLLM's formats share: Llama sizes in config.json, and names of tensors."""

from typing import Any

import torch
from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.errors import UserError

SLIDING_LAYER = "sliding_attention"  # in `layer_types`
ORIGIN_FIELDS = ("target", "target_revision", "k_trained", "trained")


def sizes_to_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Config keys of Llama.

    RoPE is written as rope_theta and rope_scaling, which old and new versions of vLLM read.
    """
    rope = dict(config.rope)
    theta = rope.pop("rope_theta", 10000.0)
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    } | window_to_json(config)


def window_to_json(config: DrafterConfig) -> dict[str, Any]:
    """The sliding window, as vLLM reads it.

    vLLM's Llama attention has a window in the layers that `layer_types` names as sliding; without
    `layer_types` it ignores `sliding_window`.
    """
    if config.sliding_window is None:
        return {}
    return {
        "sliding_window": config.sliding_window,
        "layer_types": [SLIDING_LAYER] * config.num_layers,
    }


def window_from_json(raw: dict[str, Any]) -> int | None:
    """The window of all layers. One that vLLM would ignore is ignored here, too."""
    window = raw.get("sliding_window")
    layer_types = set(raw.get("layer_types") or ())
    if window is None or SLIDING_LAYER not in layer_types:
        return None
    if len(layer_types) > 1:
        raise UserError(
            f"the drafter's layer_types are {sorted(layer_types)}: only drafters whose layers all"
            " have the same sliding window, or none, are supported"
        )
    return int(window)


def origin_to_json(config: DrafterConfig) -> dict[str, Any]:
    """The drafter's target and training, under a key of our own that vLLM ignores."""
    return {"peagle": {field: getattr(config, field) for field in ORIGIN_FIELDS}}


def origin_from_json(raw: dict[str, Any]) -> dict[str, Any]:
    origin = raw.get("peagle") or {}
    return {field: origin[field] for field in ORIGIN_FIELDS if field in origin}


def sizes_from_json(raw: dict[str, Any], fc_input_size: int | None) -> dict[str, Any]:
    """The size fields of DrafterConfig.

    `fc_input_size` is the width of fc.weight, if the file has it.
    """
    try:
        d = raw["hidden_size"]
        heads = raw["num_attention_heads"]
        sizes = {
            "num_layers": raw["num_hidden_layers"],
            "hidden_size": d,
            "intermediate_size": raw["intermediate_size"],
            "num_heads": heads,
            "vocab_size": raw["vocab_size"],
            "max_position_embeddings": raw["max_position_embeddings"],
        }
    except KeyError as missing:
        raise UserError(
            f"the drafter's config.json lacks {missing}: write the checkpoint again"
        ) from missing
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise UserError(
            f"the drafter's hidden_act is {act!r}: only drafters with silu are supported"
        )
    target_d = raw.get("target_hidden_size") or d
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = ids or raw.get("eagle_aux_hidden_state_layer_ids")
    return sizes | {
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or d // heads,
        "draft_vocab_size": raw.get("draft_vocab_size") or raw["vocab_size"],
        "target_hidden_size": target_d,
        "aux_layer_ids": tuple(ids) if ids else None,
        "num_taps": fc_input_size // target_d if fc_input_size else len(ids or (0, 0, 0)),
        "rope": _rope_from_json(raw),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "attention_bias": raw.get("attention_bias", False),
        "sliding_window": window_from_json(raw),
    }


def _rope_from_json(raw: dict[str, Any]) -> dict[str, Any]:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope["rope_type"] == "longrope" and "original_max_position_embeddings" in raw:
        # Phi-3 has it beside the other parameters, as vLLM accepts.
        rope.setdefault("original_max_position_embeddings", raw["original_max_position_embeddings"])
    return rope


def names_to_ours(tensors: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Convert vLLM's names and shapes to ours.

    d2t holds offsets, target id = i + d2t[i]. The mask token's row of the embedding table becomes
    `mask_embedding`.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        ours[name.removeprefix("model.").replace("midlayer.", "layers.0.")] = tensor
    ours.pop("t2d", None)
    offsets = ours.pop("d2t", None)
    if offsets is not None and config.pruned:
        ours["target_ids"] = offsets + torch.arange(len(offsets))
    elif offsets is not None and offsets.any():
        raise UserError(
            "d2t reorders a full vocabulary: remove it, or set draft_vocab_size to its length"
        )
    if config.method != "p-eagle":
        ours.pop("mask_hidden", None)
        return ours
    if "mask_hidden" in ours:
        ours["mask_hidden"] = ours["mask_hidden"].flatten()
    table = ours.get("embed_tokens.weight")
    mask_id = config.mask_token_id
    if table is not None and mask_id is not None and mask_id < len(table):
        ours["mask_embedding"] = table[mask_id].clone()
    return ours


def names_to_theirs(
    tensors: dict[str, Tensor], config: DrafterConfig, first_layer: str
) -> dict[str, Tensor]:
    """Convert our complete tensors to vLLM's names and shapes.

    `first_layer` is the name of layer 0 in the format: 'midlayer.' or 'layers.0.'.
    """
    theirs = {name.replace("layers.0.", first_layer, 1): tensor for name, tensor in tensors.items()}
    if (mask_embedding := theirs.pop("mask_embedding", None)) is not None:
        table = theirs["embed_tokens.weight"].clone()
        table[config.mask_token_id] = mask_embedding
        theirs["embed_tokens.weight"] = table
        theirs["mask_hidden"] = theirs["mask_hidden"].view(1, 1, -1)
    if (ids := theirs.pop("target_ids", None)) is not None:
        ids = ids.long()
        theirs["d2t"] = ids - torch.arange(len(ids))
        in_draft_vocab = torch.zeros(config.vocab_size, dtype=torch.bool)
        theirs["t2d"] = in_draft_vocab.index_fill_(0, ids, True)
    return theirs

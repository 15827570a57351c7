"""The speculators format: one folder that `vllm serve` starts from, target and K included."""

from typing import Any

import torch

from peagle.core import Method
from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats.llama import (
    origin_from_json,
    origin_to_json,
    sizes_from_json,
    sizes_to_json,
)
from peagle.errors import UserError

FIRST_LAYER = "layers.0."
KINDS: dict[Method, tuple[str, str]] = {
    "p-eagle": ("peagle", "PEagleDraftModel"),
    "eagle3": ("eagle3", "Eagle3DraftModel"),
}


def is_speculators(raw: dict[str, Any]) -> bool:
    return "speculators_model_type" in raw


def config_to_json(
    config: DrafterConfig, k: int, dtype: torch.dtype, verifier: dict[str, Any]
) -> dict[str, Any]:
    """`verifier` names the target: {"name_or_path": ..., "architectures": [...]}"""
    if config.method == "p-eagle" and (config.fc_norm or config.norm_output):
        raise UserError(
            "vLLM drops fc_norm and norm_output of a speculators P-EAGLE checkpoint: use --to vllm"
        )
    kind, architecture = KINDS[config.method]
    raw = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids or ()),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": verifier,
        },
        # vLLM counts the taps by num_aux_hidden_states in here; without it, it takes 3
        "transformer_layer_config": sizes_to_json(config, dtype)
        | {"num_aux_hidden_states": config.num_taps},
        "tie_word_embeddings": False,
    } | origin_to_json(config)
    if config.method == "p-eagle":
        return raw | {"mask_token_id": config.mask_token_id}
    return raw | {"fc_norm": config.fc_norm, "norm_output": config.norm_output}


def config_from_json(raw: dict[str, Any], fc_inputs: int | None) -> DrafterConfig:
    kind = raw["speculators_model_type"]
    method = next((method for method, (name, _) in KINDS.items() if name == kind), None)
    layer = raw.get("transformer_layer_config") or {}
    if method is None or layer.get("model_type", "llama") != "llama":
        shape = layer.get("model_type", "llama")
        raise UserError(
            f"a speculators checkpoint of kind {kind!r} with {shape} layers: only peagle and eagle3 on llama"
        )
    outer = {
        key: raw[key]
        for key in ("draft_vocab_size", "target_hidden_size")
        if raw.get(key) is not None
    }
    ids = {"eagle_aux_hidden_state_layer_ids": raw.get("eagle_aux_hidden_state_layer_ids")}
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    origin: dict[str, Any] = {"target": verifier.get("name_or_path")} | origin_from_json(raw)
    return DrafterConfig(
        method=method,
        mask_token_id=raw.get("mask_token_id") if method == "p-eagle" else None,
        norm_before_residual=bool(raw.get("norm_before_residual", method == "eagle3")),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=method == "eagle3" and bool(raw.get("fc_norm", False)),
        norm_output=method == "eagle3" and bool(raw.get("norm_output", False)),
        **sizes_from_json(layer | outer | ids, fc_inputs),
        **origin,
    )

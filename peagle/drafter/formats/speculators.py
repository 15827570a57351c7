"""The speculators format: one folder for `vllm serve`, which names the target and K."""

from dataclasses import asdict, dataclass
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
# Method -> (algorithm, architecture)
ALGORITHMS: dict[Method, tuple[str, str]] = {
    "p-eagle": ("peagle", "PEagleDraftModel"),
    "eagle3": ("eagle3", "Eagle3DraftModel"),
}


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """The target, as a speculators checkpoint names it."""

    name_or_path: str
    architectures: list[str]


def is_speculators(raw: dict[str, Any]) -> bool:
    return "speculators_model_type" in raw


def config_to_json(
    config: DrafterConfig, k: int, dtype: torch.dtype, verifier: VerifierConfig
) -> dict[str, Any]:
    if config.method == "p-eagle" and (config.fc_norm or config.norm_output):
        raise UserError(
            "vLLM ignores fc_norm and norm_output of a P-EAGLE checkpoint in the speculators"
            " format: set `to` to vllm"
        )
    algorithm, architecture = ALGORITHMS[config.method]
    raw = {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids or ()),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": asdict(verifier),
        },
        # vLLM reads the number of taps from num_aux_hidden_states and assumes 3 without it.
        "transformer_layer_config": sizes_to_json(config, dtype)
        | {"num_aux_hidden_states": config.num_taps},
        "tie_word_embeddings": False,
    } | origin_to_json(config)
    if config.method == "p-eagle":
        return raw | {"mask_token_id": config.mask_token_id}
    return raw | {"fc_norm": config.fc_norm, "norm_output": config.norm_output}


def config_from_json(raw: dict[str, Any], fc_input_size: int | None) -> DrafterConfig:
    algorithm = raw["speculators_model_type"]
    methods = {name: method for method, (name, _) in ALGORITHMS.items()}
    method = methods.get(algorithm)
    layer = raw.get("transformer_layer_config") or {}
    model_type = layer.get("model_type", "llama")
    if method is None or model_type != "llama":
        raise UserError(
            f"the speculators checkpoint has algorithm {algorithm!r} and {model_type} layers:"
            " only peagle and eagle3 with llama layers are supported"
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
        **sizes_from_json(layer | outer | ids, fc_input_size),
        **origin,
    )

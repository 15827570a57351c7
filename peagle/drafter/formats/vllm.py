"""vLLM's native format, also used by AWS: a Llama config with the keys of its EAGLE-3 loader."""

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

FIRST_LAYER = "midlayer."
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM reads


def is_vllm(raw: dict[str, Any]) -> bool:
    return raw.get("model_type") == "llama"


def config_to_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    raw = sizes_to_json(config, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids or ()),
        },
    }
    raw |= {switch: getattr(config, switch) for switch in SWITCHES} | origin_to_json(config)
    if config.method == "p-eagle":
        raw |= {"ptd_token_id": config.mask_token_id, "pard_token": config.mask_token_id}
    return raw


def config_from_json(raw: dict[str, Any], fc_input_size: int | None) -> DrafterConfig:
    mask_id = next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)
    method: Method = "eagle3" if mask_id is None else "p-eagle"
    switches: dict[str, Any] = {switch: bool(raw.get(switch, False)) for switch in SWITCHES}
    switches["norm_before_fc"] |= bool((raw.get("eagle_config") or {}).get("norm_before_fc", False))
    return DrafterConfig(
        method=method,
        mask_token_id=None if mask_id is None else int(mask_id),
        **switches,
        **sizes_from_json(raw, fc_input_size),
        **origin_from_json(raw),
    )

"""Tiny targets whose RoPE depends on the length of a pass in transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.untrained import untrained_drafter
from peagle.target import Target
from tests.support.engine.engines import word_tokenizer
from tests.support.models.tiny_models import MASK, SIZES

BOUNDARY = 48  # original_max_position_embeddings; of dynamic NTK, the end of the context
AUX = (0, 1, 2)
TINY = {**SIZES, "num_hidden_layers": 3, "max_position_embeddings": 128}
del TINY["head_dim"]  # Phi-3 has none: 8
SCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def longrope(dims: int = 8) -> dict[str, Any]:
    """Parameters for this many rotated dimensions of a head."""
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 10 for i in range(dims // 2)],
        "long_factor": [4.0 + i for i in range(dims // 2)],
        "original_max_position_embeddings": BOUNDARY,
    }


def rope_config(name: str) -> PretrainedConfig:
    # Configs change the dictionary that they get.
    if name == "phi3":
        return Phi3Config(
            **TINY, original_max_position_embeddings=BOUNDARY, rope_parameters=longrope()
        )
    if name == "phi4":  # the last dimensions of a head do not rotate
        partial = longrope(12) | {"partial_rotary_factor": 0.75}
        sizes = TINY | {"hidden_size": 64}
        return Phi3Config(
            **sizes, original_max_position_embeddings=BOUNDARY, rope_parameters=partial
        )
    if name == "phimoe":
        return PhimoeConfig(**TINY, num_local_experts=2, rope_parameters=longrope() | SCALES)
    if name == "gemma3":  # other parameters for each type of layer
        types = ["sliding_attention", "full_attention", "full_attention"]
        parameters = {
            "full_attention": longrope(),
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        return Gemma3TextConfig(
            **TINY, head_dim=8, sliding_window=16, layer_types=types, rope_parameters=parameters
        )
    if name == "dynamic":
        sizes = TINY | {"max_position_embeddings": BOUNDARY}
        return LlamaConfig(**sizes, rope_parameters=dict(DYNAMIC))
    assert name == "llama"
    return LlamaConfig(**TINY, rope_parameters=longrope())


def rope_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(rope_config(name), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model.eval()


def rope_target(name: str, context: int | None = None) -> Target:
    return Target(rope_model(name), name=f"tiny {name}", context=context)


def rope_drafter(target: Target, method: Method = "p-eagle") -> Drafter:
    config = config_for(target, method, 1, AUX, MASK, trained=False)
    return untrained_drafter(config, target, seed=7)


def save_rope_target(name: str, folder: Path) -> Path:
    """Save the target with a word tokenizer, in which token 17 is w17."""
    rope_model(name).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder

"""Pairs of a given shape with random weights, to measure what their steps cost."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from peagle.catalog.pair import Pair, TargetSource
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.errors import UserError, did_you_mean
from peagle.loaded import LoadedPair
from peagle.target import Target

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}


def random_pair(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> LoadedPair:
    """A target of that shape with random weights, and random drafters of both methods for it."""
    if shape not in SHAPES:
        raise UserError(
            f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}."
            f"{did_you_mean(shape, list(SHAPES))}"
        )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**SHAPES[shape]), dtype=dtype, trust_remote_code=False
        )
    target = Target(model, name=shape)
    layers: dict[Method, int] = {"p-eagle": 4, "eagle3": 1}
    drafters = {method: random_drafter(target, method, count) for method, count in layers.items()}
    return LoadedPair(Pair(shape, TargetSource(()), {}, k=7), target, drafters)


def random_drafter(target: Target, method: Method, layers: int) -> Drafter:
    config = config_for(
        target, method, layers, None, mask_token_id=target.vocab_size - 1, trained=False
    )
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype)
    drafter.set_embed_and_head(target.embedding, target.lm_head)
    return drafter.eval().requires_grad_(False)

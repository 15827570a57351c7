"""Tiny random targets of every supported architecture, and drafters for them."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.untrained import untrained_drafter
from peagle.target import Target

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
WINDOW: dict[str, Any] = {"sliding_window": 8}  # shorter than the sequences of the tests
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **MOE),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": lambda: Gemma2Config(**SIZES, **WINDOW, query_pre_attn_scalar=16),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **WINDOW, query_pre_attn_scalar=16),
}
# The engine has a code path for each of these: fused layers, fused experts, transformers' layers.
ENGINE_PATHS = ("llama", "qwen3-moe", "gemma2")
OTHER_MIXTURES = {"mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4)}
LEARNED_POSITIONS = {  # Their position table ends with the context.
    "gpt2": lambda: GPT2Config(**SIZES | {"max_position_embeddings": 64}),
    "opt": lambda: OPTConfig(
        **SIZES | {"max_position_embeddings": 64}, ffn_dim=48, word_embed_proj_dim=32
    ),
}

AUX = (1, 3, 6)
MASK = 5


def make_target(name: str = "llama", seed: int = 0, **overrides: Any) -> Target:
    torch.manual_seed(seed)
    config = (CONFIGS | OTHER_MIXTURES | LEARNED_POSITIONS)[name]()
    for key, value in overrides.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Wider than the default initialization: varied tokens and no near ties.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return Target(model, name=f"tiny {name}")


def make_drafter(
    target: Target,
    method: Method,
    layers: int,
    draft_vocab: int | None = None,
    aux: tuple[int, ...] = AUX,
    **switches: Any,
) -> Drafter:
    config = config_for(target, method, layers, aux, MASK, draft_vocab, trained=False, **switches)
    ids = None
    if draft_vocab is not None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab].sort().values
    return untrained_drafter(config, target, seed=7, target_ids=ids)


def add_noise(module: nn.Module, scale: float) -> None:
    """Add noise to all parameters: no bias stays 0, no norm 1, and rows differ."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)

"""Tiny mixtures of experts with drafters, and their answers in transformers."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from peagle.core import DRAFTER_METHODS, Method
from peagle.drafter import Drafter
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.engine.engines import EngineRequest, pair_of
from tests.support.models.tiny_models import make_drafter, make_target

AUX = (0, 1, 2)
LAYERS: dict[str, Any] = {"num_hidden_layers": 3}
GPT_OSS_LAYERS: dict[str, Any] = LAYERS | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": LAYERS | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "gpt-oss": GPT_OSS_LAYERS | {"num_local_experts": 8, "num_experts_per_tok": 4},
    "mixtral": LAYERS | {"num_local_experts": 6, "num_experts_per_tok": 2},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights that do not sum to 1": ("qwen3-moe", {"norm_topk_prob": False}),
    "one expert per row": ("qwen3-moe", {"num_experts_per_tok": 1}),
    "all experts": ("mixtral", {"num_experts_per_tok": 6}),
    "dense layers": ("qwen3-moe", {"mlp_only_layers": [0, 2]}),
    "tied": ("mixtral", {"tie_word_embeddings": True}),
}


def make_mixture(name: str, seed: int = 0, **changes: Any) -> Target:
    """A target of three layers with large weights for varied answers, and nonzero biases."""
    target = make_target(name, seed, **MIXTURES[name] | changes)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in target.model.named_parameters():
        if key.endswith(("bias", "sinks")):
            parameter.data.normal_(0, 0.2, generator=generator)
        elif parameter.ndim > 1:
            parameter.data.mul_(3)
    return target


def round_weights(target: Target) -> None:
    """Round all weights to bfloat16, because the C kernels pack only such weights."""
    for parameter in target.model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def packable_mixture(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    """`make_mixture` with weights that bf16 holds exactly: the C kernels pack them."""
    target = make_mixture(name, **changes)
    target.model.to(torch.bfloat16).to(dtype)
    return target


def mixture_pair(target: Target) -> LoadedPair:
    drafters: dict[Method, Drafter] = {
        method: make_drafter(target, method, 1, aux=AUX) for method in DRAFTER_METHODS
    }
    return pair_of(target, drafters)


def generate_all(target: Target, requests: list[EngineRequest], count: int) -> list[list[int]]:
    """Greedy answers of transformers; prompts of equal length share a batch."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, (ids, _) in enumerate(requests):
        by_length[len(ids)].append(i)
    answers: dict[int, list[int]] = {}
    for indices in by_length.values():
        prompts = torch.tensor([requests[i][0] for i in indices], device=target.device)
        rows = generate(target, prompts, count)
        answers |= dict(zip(indices, rows.tolist(), strict=True))
    return [answers[i] for i in range(len(requests))]


@torch.inference_mode()
def generate(target: Target, prompts: Tensor, count: int) -> Tensor:
    """prompts [B, n] -> [B, count]"""
    out = target.model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return out[:, prompts.shape[1] :]

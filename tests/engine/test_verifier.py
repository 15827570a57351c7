"""The target over pages, lean or plugged, says what transformers says; what only looks like a Llama is found out."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget, merge, merged
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.verifier import PROBE, Verifier, cache_shapes, verifier_for
from peagle.kernels.row_pass import RowPass
from peagle.target import Target
from tests.support.tiny_models import CONFIGS, SIZES, make_target

TAPS = (0, 2, 3)
LENGTH, PAGE, FOUR = 60, 8, {**SIZES, "num_hidden_layers": 4}
SLIDING = {"use_sliding_window": True, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LEAN: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**FOUR),
    "llama, tied": LlamaConfig(**FOUR, tie_word_embeddings=True),
    "llama, attention biases": LlamaConfig(**FOUR, attention_bias=True),
    "llama, one head of keys": LlamaConfig(**FOUR | {"num_key_value_heads": 1}),
    "llama, as many heads of keys": LlamaConfig(**FOUR | {"num_key_value_heads": 4}),
    "llama 3's rope": LlamaConfig(**FOUR, rope_parameters=LLAMA3),
    "llama, yarn": LlamaConfig(**FOUR, rope_parameters=YARN),
    "mistral": MistralConfig(**FOUR, sliding_window=None),
    "mistral, window": MistralConfig(**FOUR, sliding_window=7),
    "mistral, long window": MistralConfig(**FOUR, sliding_window=PROBE + 10),
    "qwen2": Qwen2Config(**FOUR),
    "qwen2, tied": Qwen2Config(**FOUR, tie_word_embeddings=True),
    "qwen2, window": Qwen2Config(**FOUR, **SLIDING, sliding_window=7),
    "qwen2, long window": Qwen2Config(**FOUR, **SLIDING, sliding_window=PROBE + 10),
    "qwen3": Qwen3Config(**FOUR),
    "qwen3, window": Qwen3Config(**FOUR, **SLIDING, sliding_window=9),
}
UNALIKE: dict[str, PretrainedConfig] = {  # the parts of a Llama, but not its arithmetic
    "granite": GraniteConfig(
        **FOUR, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "llama, biases in the MLP": LlamaConfig(**FOUR, mlp_bias=True),
}


def target_of(config: PretrainedConfig) -> Target:
    """Random weights; biases and norms that are not zero and one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
        else:
            parameter.data.add_(torch.randn_like(parameter) / 4)
    return Target(model)


def truth(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' own pass: logits and taps."""
    target.tap(TAPS)
    out = target.forward(ids)
    return out.logits, out.hidden


def in_pieces(
    verifier: Verifier, target: Target, ids: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Two requests over scattered pages, each in pieces of these sizes; both say the same."""
    verifier.taps = TAPS
    pages = -(-len(ids) // PAGE)
    memory = KVCache(cache_shapes(target), 2 * pages, PAGE, target.device)
    tables = (
        torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).view(2, pages).int()
    )
    logits, hidden, start = [], [], 0
    for size in sizes:
        at, count = torch.arange(start, start + size), torch.tensor([size, size], dtype=torch.int32)
        slots = (tables.long()[:, at // PAGE] * PAGE + at % PAGE).flatten()
        begin, first = (
            count * torch.tensor([0, 1], dtype=torch.int32),
            torch.full_like(count, start),
        )
        rows = RowPass(at.repeat(2), slots, tables, begin, count, first, size, PAGE)
        with torch.inference_mode():
            said, taps = (
                x.view(2, size, -1) for x in verifier.forward(ids[at].repeat(2), rows, memory)
            )
        torch.testing.assert_close(said[0], said[1], atol=1e-4, rtol=1e-4)
        logits.append(said[0])
        hidden.append(taps[0])
        start += size
    return torch.cat(logits), torch.cat(hidden)


def check(verifier: Verifier, target: Target, ids: Tensor, sizes: tuple[int, ...]) -> None:
    for mine, theirs in zip(
        in_pieces(verifier, target, ids, sizes), truth(target, ids), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-3)


IDS = torch.randint(96, (LENGTH,), generator=torch.Generator().manual_seed(3))
WAYS = [
    (LENGTH,),
    (17, 1, 1, 4, 8, 3, 26),
    (40, 4, 4, 4, 4, 4),
]  # at once; chunks and blocks; steps with K = 3


@pytest.mark.parametrize("name", LEAN)
def test_lean_equals_plugged_equals_transformers(name: str) -> None:
    target = target_of(LEAN[name])
    verifier = verifier_for(target, LENGTH)
    assert isinstance(verifier, FusedLlamaTarget)
    for sizes in WAYS:
        check(verifier, target, IDS, sizes)
        check(HFPagedTarget(target), target, IDS, sizes)


@pytest.mark.parametrize("name", UNALIKE)
def test_what_only_looks_like_a_llama_is_plugged(name: str) -> None:
    target = target_of(UNALIKE[name])
    verifier = verifier_for(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget)
    check(verifier, target, IDS, WAYS[1])


def test_a_patched_llama_is_plugged() -> None:
    target = target_of(LEAN["llama"])
    target.layers[2].mlp.register_forward_hook(lambda module, args, out: out * 0.8)
    verifier = verifier_for(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget)
    check(verifier, target, IDS, WAYS[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str) -> None:
    target = make_target(name)
    verifier = verifier_for(target, LENGTH)
    assert isinstance(verifier, FusedLlamaTarget) == (name in ("llama", "qwen2", "qwen3"))
    for sizes in WAYS:
        check(verifier, target, IDS, sizes)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_only_the_rows_that_are_wanted(name: str) -> None:
    target = make_target(name)
    verifier, memory = (
        verifier_for(target, LENGTH),
        KVCache(cache_shapes(target), 8, PAGE, target.device),
    )
    at, one = torch.arange(20), torch.tensor([20], dtype=torch.int32)
    rows = RowPass(
        at, at, torch.arange(8, dtype=torch.int32)[None], one * 0, one, one * 0, 20, PAGE
    )
    with torch.inference_mode():
        logits, hidden = verifier.forward(IDS[:20], rows, memory, torch.tensor([3, 19]))
    torch.testing.assert_close(logits, truth(target, IDS[:20])[0][[3, 19]], atol=1e-4, rtol=1e-3)
    assert hidden.shape == (20, 0)


# Merged weights.


def linears(layer: Any) -> list[list[Any]]:
    attention, mlp = layer.self_attn, layer.mlp
    return [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]


def owned(target: Target) -> int:
    """Bytes of all weights, each piece of memory counted once."""
    pieces = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in target.model.parameters()
    }
    return sum(pieces.values())


@pytest.mark.parametrize("name", ["llama, attention biases", "qwen2, tied", "qwen3"])
def test_merging_costs_no_copy_and_changes_nothing(name: str) -> None:
    target = target_of(LEAN[name])
    before, size = truth(target, IDS), owned(target)
    state = {key: value.clone() for key, value in target.model.state_dict().items()}
    lean = verifier_for(target, LENGTH)
    assert isinstance(lean, FusedLlamaTarget)
    assert owned(target) == size
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(truth(target, IDS), before, strict=True)
    )
    assert all(torch.equal(value, state[key]) for key, value in target.model.state_dict().items())
    for layer, module in zip(lean.layers, target.layers, strict=True):
        qkv, gate_up = linears(module)
        for mine, theirs in ((layer.qkv.plain, qkv), (layer.gate_up.plain, gate_up)):
            assert mine.data_ptr() == theirs[0].weight.data_ptr() and torch.equal(
                mine, weights(theirs)
            )
    again = verifier_for(target, LENGTH)  # a second engine on the same target
    assert isinstance(again, FusedLlamaTarget)
    for first, second in zip(lean.layers, again.layers, strict=True):
        one, other = first.qkv, second.qkv
        assert one.plain.data_ptr() == other.plain.data_ptr() and torch.equal(
            one.plain, other.plain
        )
        assert (one.bias is None) == (other.bias is None)
        if one.bias is not None and other.bias is not None:
            assert one.bias.data_ptr() == other.bias.data_ptr() and torch.equal(
                one.bias, other.bias
            )
    check(again, target, IDS, WAYS[1])


def weights(parts: list[Any]) -> Tensor:
    return torch.cat([part.weight for part in parts])


def test_weights_that_lie_apart_are_not_taken_for_merged() -> None:
    first, second = torch.nn.Linear(4, 6), torch.nn.Linear(4, 2)
    assert not merged([first, second])
    weight, bias = merge([first, second])
    assert merged([first, second]) and weight.shape == (8, 4) and bias is not None
    x = torch.randn(3, 4)
    torch.testing.assert_close(
        torch.nn.functional.linear(x, weight, bias), torch.cat([first(x), second(x)], -1)
    )
    assert not merged([second, first])

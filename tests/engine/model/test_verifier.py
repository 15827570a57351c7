"""Both verifiers give the logits of transformers; models that are not exactly Llama-like are
detected.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CwmConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    NemotronConfig,
    OlmoConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from peagle.engine import Engine, EngineConfig
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model import fused_llama, verifier, verifier_probe
from peagle.engine.model.dense_mlp import DenseMLP
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.merged_linear import are_merged, merge_linears
from peagle.engine.model.paged_limits import check_paged_context
from peagle.engine.model.verifier import Verifier, build_verifier, target_kv_shapes
from peagle.engine.model.verifier_probe import PROBE_TOKENS, VerifierProbe
from peagle.errors import UserError
from peagle.kernels.row_pass import RowPass
from peagle.target import Target
from tests.support.engine.engines import pair_of
from tests.support.models.tiny_models import CONFIGS, SIZES, make_target

TAPS = (0, 2, 3)
LENGTH = 60
PAGE = 8
FOUR = {**SIZES, "num_hidden_layers": 4}
LATENT_ATTENTION = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 4,
}
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


def ministral3(beta: float, original: int = 32) -> PretrainedConfig:
    """Queries at positions from `original` on are scaled, if `beta` is not zero."""
    parameters = YARN | {
        "original_max_position_embeddings": original,
        "llama_4_scaling_beta": beta,
    }
    return Ministral3Config(**FOUR, rope_parameters=parameters)


LLAMA_LIKE: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**FOUR),
    "llama, tied": LlamaConfig(**FOUR, tie_word_embeddings=True),
    "llama, attention biases": LlamaConfig(**FOUR, attention_bias=True),
    "llama, one head of keys": LlamaConfig(**FOUR | {"num_key_value_heads": 1}),
    "llama, as many heads of keys": LlamaConfig(**FOUR | {"num_key_value_heads": 4}),
    "llama 3's rope": LlamaConfig(**FOUR, rope_parameters=LLAMA3),
    "llama, yarn": LlamaConfig(**FOUR, rope_parameters=YARN),
    "llama, yarn and a long context": LlamaConfig(
        **FOUR | {"max_position_embeddings": 1 << 17},
        rope_parameters=YARN | {"factor": 2048.0},
    ),
    "cwm": CwmConfig(**FOUR, sliding_window=7),
    "seed-oss": SeedOssConfig(**FOUR),
    "ministral 3, no scaling": ministral3(beta=0.0),
    "mistral": MistralConfig(**FOUR, sliding_window=None),
    "mistral, window": MistralConfig(**FOUR, sliding_window=7),
    "mistral, long window": MistralConfig(**FOUR, sliding_window=PROBE_TOKENS + 10),
    "qwen2": Qwen2Config(**FOUR),
    "qwen2, tied": Qwen2Config(**FOUR, tie_word_embeddings=True),
    "qwen2, window": Qwen2Config(**FOUR, **SLIDING, sliding_window=7),
    "qwen2, long window": Qwen2Config(**FOUR, **SLIDING, sliding_window=PROBE_TOKENS + 10),
    "qwen3": Qwen3Config(**FOUR),
    "qwen3, window": Qwen3Config(**FOUR, **SLIDING, sliding_window=9),
}
# They have the modules of a Llama, but compute something else.
NOT_LLAMA: dict[str, PretrainedConfig] = {
    "granite": GraniteConfig(
        **FOUR, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "llama, biases in the MLP": LlamaConfig(**FOUR, mlp_bias=True),
    "ministral 3": ministral3(beta=0.5),
    "ministral 3, hardly scaled": ministral3(beta=0.01),
    "smollm 3, layers without rope": SmolLM3Config(**FOUR),
    "olmo, norms without weights": OlmoConfig(**FOUR),
}


def target_of(config: PretrainedConfig) -> Target:
    """A target with random weights, in which no bias is zero and no norm is one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
        else:
            parameter.data.add_(torch.randn_like(parameter) / 4)
    return Target(model)


def transformers_outputs(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and taps of a pass of transformers."""
    target.tap(TAPS)
    out = target.forward(ids)
    return out.logits, out.hidden


def in_chunks(
    verifier: Verifier, target: Target, ids: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Run two equal requests over scattered pages in chunks, and check that they agree."""
    verifier.taps = TAPS
    pages = -(-len(ids) // PAGE)
    kv_cache = KVCache(target_kv_shapes(target), 2 * pages, PAGE, target.device)
    tables = (
        torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).view(2, pages).int()
    )
    logits, hidden, start = [], [], 0
    for size in sizes:
        positions = torch.arange(start, start + size)
        counts = torch.tensor([size, size], dtype=torch.int32)
        slots = (tables.long()[:, positions // PAGE] * PAGE + positions % PAGE).flatten()
        starts = counts * torch.tensor([0, 1], dtype=torch.int32)
        first = torch.full_like(counts, start)
        rows = RowPass(positions.repeat(2), slots, tables, starts, counts, first, size, PAGE)
        with torch.inference_mode():
            outputs = verifier.forward(ids[positions].repeat(2), rows, kv_cache)
        both, taps = (x.view(2, size, -1) for x in outputs)
        torch.testing.assert_close(both[0], both[1], atol=1e-4, rtol=1e-4)
        logits.append(both[0])
        hidden.append(taps[0])
        start += size
    return torch.cat(logits), torch.cat(hidden)


def check(verifier: Verifier, target: Target, ids: Tensor, sizes: tuple[int, ...]) -> None:
    for mine, theirs in zip(
        in_chunks(verifier, target, ids, sizes), transformers_outputs(target, ids), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-3)


IDS = torch.randint(96, (LENGTH,), generator=torch.Generator().manual_seed(3))
CHUNKS = [
    (LENGTH,),
    (17, 1, 1, 4, 8, 3, 26),
    (40, 4, 4, 4, 4, 4),  # steps with K = 3
]


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_both_verifiers_equal_transformers(name: str) -> None:
    target = target_of(LLAMA_LIKE[name])
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, FusedLlamaTarget)
    for sizes in CHUNKS:
        check(verifier, target, IDS, sizes)
        check(HFPagedTarget(target), target, IDS, sizes)


@pytest.mark.parametrize("name", NOT_LLAMA)
def test_models_with_other_arithmetic_are_not_fused(name: str) -> None:
    target = target_of(NOT_LLAMA[name])
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget)
    check(verifier, target, IDS, CHUNKS[1])


@pytest.fixture
def compile_passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run compile passes as on a GPU, and record whether they wait for their kernels."""
    passes: list[str] = []

    def compile_ahead(
        work: Callable[[], object], device: object, description: str = "", wait: bool = True
    ) -> None:
        passes.append("compile" if wait else "start")
        work()

    for module in (verifier, verifier_probe):
        monkeypatch.setattr(module, "compile_ahead", compile_ahead)
    return passes


def test_kernels_of_later_passes_start_to_compile_before_the_probe(
    compile_passes: list[str],
) -> None:
    target = target_of(next(iter(LLAMA_LIKE.values())))
    fused: list[FusedLlamaTarget] = []
    chosen = build_verifier(target, LENGTH, fused.append)
    assert fused == [chosen]
    # The pass of transformers, the fused layers and later passes; then the first two again.
    assert compile_passes == ["start"] * 3 + ["compile"] * 2
    check(chosen, target, IDS, CHUNKS[1])


def test_compile_passes_skip_layers_with_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = target_of(LlamaConfig(**{**SIZES, "num_hidden_layers": 7}))
    fused = build_verifier(target, LENGTH)
    assert isinstance(fused, FusedLlamaTarget)
    layer = fused.layers[5]
    fused.layers[5] = replace(layer, attention=replace(layer.attention, window=8))
    fused.taps = (3,)
    kv_cache = KVCache(target_kv_shapes(target), 4, PAGE, target.device)

    def layers() -> list[int]:
        return [i for i, _ in fused._launched_layers(kv_cache)]

    assert layers() == list(range(7))
    monkeypatch.setattr(fused_llama, "is_dry", lambda: True)
    assert layers() == [0, 1, 3, 5]


@pytest.mark.parametrize("name", NOT_LLAMA)
def test_compile_passes_do_not_affect_the_probe(name: str, compile_passes: list[str]) -> None:
    target = target_of(NOT_LLAMA[name])
    chosen = build_verifier(target, LENGTH, lambda fused: None)
    assert isinstance(chosen, HFPagedTarget)
    check(chosen, target, IDS, CHUNKS[1])


def test_scaling_beyond_the_context_of_the_engine_is_allowed() -> None:
    """Ministral 3 is a Llama up to `original_max_position_embeddings`."""
    target = target_of(ministral3(beta=0.5, original=64))
    assert isinstance(build_verifier(target, 64), FusedLlamaTarget)
    for length in (65, 100, 256, 300):
        assert isinstance(build_verifier(target, length), HFPagedTarget)


@pytest.mark.parametrize("original", [64, 200])
def test_scaled_queries_are_detected_in_half_precision(original: int) -> None:
    """There, a difference of the logits could be mistaken for rounding."""
    target = target_of(ministral3(beta=0.1, original=original))
    target.model.to(torch.bfloat16)
    assert isinstance(build_verifier(target, 256), HFPagedTarget)
    target = target_of(ministral3(beta=0.0, original=original))
    target.model.to(torch.bfloat16)
    assert isinstance(build_verifier(target, 256), FusedLlamaTarget)


@pytest.mark.parametrize("option", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}])
def test_attention_with_unknown_options_is_not_fused(
    option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft cap far above the scores of the probe has no effect on its logits."""
    target = target_of(LLAMA_LIKE["llama"])
    own = LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs, **option)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    assert isinstance(build_verifier(target, LENGTH), HFPagedTarget)


def llama4(chunk: int = 1 << 13, floor_scale: int = 1 << 13) -> PretrainedConfig:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    return Llama4TextConfig(
        **FOUR, **experts, attention_chunk_size=chunk, floor_scale=floor_scale, attn_scale=0.5
    )


@pytest.mark.parametrize("config", [llama4(chunk=100), llama4(floor_scale=101)])
def test_the_context_of_llama_4_ends_where_its_attention_changes(config: PretrainedConfig) -> None:
    target = target_of(config)
    check_paged_context(target, 100)
    check(build_verifier(target, 100), target, IDS, CHUNKS[1])
    with pytest.raises(UserError, match=r"contexts of up to 100 tokens.*set `context` to 100"):
        check_paged_context(target, 101)
    pair = pair_of(target)
    with pytest.raises(UserError, match="set `context` to 100"):
        Engine(pair, EngineConfig(method="none", thread=False))
    Engine(pair, EngineConfig(method="none", thread=False, context=100)).close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BertConfig(**FOUR), "compute something else"),  # Rows attend to later tokens.
        # Its attention runs twice.
        (DiffLlamaConfig(**FOUR | {"head_dim": 8}), "compute something else"),
        (NemotronConfig(**FOUR), "does not pass arguments on"),
        (DeepseekV3Config(**FOUR | LATENT_ATTENTION), "keys and values differ in size"),
    ],
)
def test_targets_that_pages_cannot_run_are_refused(config: PretrainedConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_verifier(target_of(config), LENGTH)


@pytest.mark.parametrize("length", [2, 7, 23])
def test_contexts_shorter_than_the_probe(length: int) -> None:
    target = target_of(LLAMA_LIKE["llama"])
    assert isinstance(build_verifier(target, length), FusedLlamaTarget)
    gpt2 = make_target("gpt2")
    gpt2.model.config.n_positions = length
    assert isinstance(build_verifier(gpt2, length + 5), HFPagedTarget)


def test_a_patched_llama_is_not_fused() -> None:
    target = target_of(LLAMA_LIKE["llama"])
    target.layers[2].mlp.register_forward_hook(lambda module, args, out: out * 0.8)
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget)
    check(verifier, target, IDS, CHUNKS[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str) -> None:
    target = make_target(name)
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget) == (name in ("gemma2", "gemma3"))
    for sizes in CHUNKS:
        check(verifier, target, IDS, sizes)


@pytest.mark.parametrize("window", [None, 7, PROBE_TOKENS + 10])
def test_a_window_that_is_only_in_the_mask(window: int | None) -> None:
    """Phi-MoE does not pass its window to the attention function."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    target = target_of(PhimoeConfig(**FOUR, **experts, sliding_window=window))
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget)
    assert set(verifier.windows.values()) == {window}
    check(verifier, target, IDS, CHUNKS[1])


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma2"])
def test_logits_of_some_rows(name: str) -> None:
    target = make_target(name)
    verifier = build_verifier(target, LENGTH)
    kv_cache = KVCache(target_kv_shapes(target), 8, PAGE, target.device)
    positions = torch.arange(20)
    count = torch.tensor([20], dtype=torch.int32)
    tables = torch.arange(8, dtype=torch.int32)[None]
    rows = RowPass(positions, positions, tables, count * 0, count, count * 0, 20, PAGE)
    with torch.inference_mode():
        logits, hidden = verifier.forward(IDS[:20], rows, kv_cache, torch.tensor([3, 19]))
    torch.testing.assert_close(
        logits, transformers_outputs(target, IDS[:20])[0][[3, 19]], atol=1e-4, rtol=1e-3
    )
    assert hidden.shape == (20, 0)


# Merged weights.


def linears(layer: Any) -> list[list[Any]]:
    attention, mlp = layer.self_attn, layer.mlp
    return [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]


def weight_bytes(target: Target) -> int:
    """Bytes of all weights, each storage counted once."""
    pieces = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in target.model.parameters()
    }
    return sum(pieces.values())


@pytest.mark.parametrize("name", ["llama, attention biases", "qwen2, tied", "qwen3"])
def test_merged_weights_are_not_copied_and_stay_equal(name: str) -> None:
    target = target_of(LLAMA_LIKE[name])
    before, size = transformers_outputs(target, IDS), weight_bytes(target)
    state = {key: value.clone() for key, value in target.model.state_dict().items()}
    fused = build_verifier(target, LENGTH)
    assert isinstance(fused, FusedLlamaTarget)
    assert weight_bytes(target) == size
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(transformers_outputs(target, IDS), before, strict=True)
    )
    assert all(torch.equal(value, state[key]) for key, value in target.model.state_dict().items())
    for layer, module in zip(fused.layers, target.layers, strict=True):
        qkv, gate_up = linears(module)
        dense = layer.mlp
        assert isinstance(dense, DenseMLP)
        for mine, theirs in ((layer.qkv.weight, qkv), (dense.gate_up.weight, gate_up)):
            assert mine.data_ptr() == theirs[0].weight.data_ptr() and torch.equal(
                mine, weights(theirs)
            )
    again = build_verifier(target, LENGTH)  # a second engine on the same target
    assert isinstance(again, FusedLlamaTarget)
    for first, second in zip(fused.layers, again.layers, strict=True):
        one, other = first.qkv, second.qkv
        assert one.weight.data_ptr() == other.weight.data_ptr() and torch.equal(
            one.weight, other.weight
        )
        assert (one.bias is None) == (other.bias is None)
        if one.bias is not None and other.bias is not None:
            assert one.bias.data_ptr() == other.bias.data_ptr() and torch.equal(
                one.bias, other.bias
            )
    check(again, target, IDS, CHUNKS[1])


def weights(parts: list[Any]) -> Tensor:
    return torch.cat([part.weight for part in parts])


def test_separate_weights_are_not_merged() -> None:
    first, second = torch.nn.Linear(4, 6), torch.nn.Linear(4, 2)
    assert not are_merged([first, second])
    weight, bias = merge_linears([first, second])
    assert are_merged([first, second]) and weight.shape == (8, 4) and bias is not None
    x = torch.randn(3, 4)
    torch.testing.assert_close(
        torch.nn.functional.linear(x, weight, bias), torch.cat([first(x), second(x)], -1)
    )
    assert not are_merged([second, first])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_engines_of_one_target_are_probed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[int] = []
    probe = verifier.VerifierProbe

    def record(*args: Any) -> VerifierProbe:
        probes.append(args[-1])
        return probe(*args)

    monkeypatch.setattr(verifier, "VerifierProbe", record)
    target = make_target(name)
    kinds = [type(build_verifier(target, length)) for length in (64, 64, 32, 64)]
    assert len(set(kinds)) == 1 and probes == [64, 32]  # Other positions are probed again.

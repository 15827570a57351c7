"""The probe that decides which mixtures of experts run as fused layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.mixture import Mixture
from peagle.engine.model.verifier import Verifier, build_verifier, target_kv_shapes
from peagle.kernels.row_pass import RowPass
from peagle.target import Target
from tests.support.models.mixtures import MIXTURES, VARIANTS, make_mixture
from tests.support.models.tiny_models import MOE, SIZES, make_target

LENGTH = 60
PAGE = 16
IDS = torch.randint(96, (LENGTH,), generator=torch.Generator().manual_seed(3))
DTYPES = [torch.float32, torch.bfloat16]
Routed = tuple[Tensor, Tensor, Tensor]  # logits, weights, experts
ALL_MIXTURES = VARIANTS | {name: (name, {}) for name in MIXTURES}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def fused(target: Target) -> FusedLlamaTarget:
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, FusedLlamaTarget)
    return verifier


def logits_of(verifier: Verifier, target: Target) -> Tensor:
    """The logits of one pass over all tokens."""
    pages = -(-LENGTH // PAGE)
    kv_cache = KVCache(target_kv_shapes(target), pages, PAGE, target.device)
    positions = torch.arange(LENGTH)
    count = torch.tensor([LENGTH], dtype=torch.int32)
    tables = torch.arange(pages, dtype=torch.int32)[None]
    rows = RowPass(positions, positions, tables, count * 0, count, count * 0, LENGTH, PAGE)
    with torch.inference_mode():
        return verifier.forward(IDS, rows, kv_cache)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_MIXTURES)
def test_mixtures_are_fused(name: str, dtype: torch.dtype) -> None:
    architecture, changes = ALL_MIXTURES[name]
    target = make_mixture(architecture, **changes)
    target.model.to(dtype)
    verifier = fused(target)
    sparse = [isinstance(layer.mlp, Mixture) for layer in verifier.layers]
    assert sparse == ([False, True, False] if name == "dense layers" else [True] * 3)
    if dtype == torch.float32:
        expected = target.forward(IDS).logits
        torch.testing.assert_close(logits_of(verifier, target), expected, atol=1e-3, rtol=1e-3)


def test_the_rows_of_a_pass_are_counted() -> None:
    target = make_mixture("qwen3-moe")
    verifier = fused(target)
    for _ in range(2):  # The counts are those of the last pass.
        logits_of(verifier, target)
        counts = verifier.expert_counts
        assert counts is not None and counts.shape == (3, 8 + 1)
        assert counts[:, :-1].sum(1).tolist() == [LENGTH * 3] * 3
        assert torch.equal(counts[:, -1], (counts[:, :-1] > 0).sum(1).int())


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_not_copied(name: str) -> None:
    """Experts of GPT-OSS are stored transposed; their memory is rearranged in place, once."""
    target = make_mixture(name)
    state = {key: value.clone() for key, value in target.model.state_dict().items()}
    verifiers = [fused(target), fused(target)]
    for verifier in verifiers:
        for layer, module in zip(verifier.layers, target.layers, strict=True):
            mlp: Any = layer.mlp
            experts: Any = module.mlp.experts
            assert mlp.gate_up.weight.data_ptr() == experts.gate_up_proj.data_ptr()
            assert mlp.down.weight.data_ptr() == experts.down_proj.data_ptr()
            assert mlp.gate_up.weight.is_contiguous() and mlp.down.weight.is_contiguous()
    first, second = (verifier.expert_counts for verifier in verifiers)
    assert first is not None and second is not None and first.data_ptr() != second.data_ptr()
    for key, value in target.model.state_dict().items():
        assert torch.equal(value, state[key]) and value.shape == state[key].shape
    torch.testing.assert_close(
        logits_of(verifiers[1], target), target.forward(IDS).logits, atol=1e-3, rtol=1e-3
    )


# Other routing rules and activations.


def sigmoid_weights(self: Any, hidden: Tensor) -> Routed:
    logits = linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    weights, experts = logits.float().sigmoid().topk(self.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), experts


own_forward = Qwen3MoeTopKRouter.forward


def scaled_weights(self: Any, hidden: Tensor) -> Routed:
    logits, weights, experts = own_forward(self, hidden)
    return logits, weights * 1.2, experts


def weights_in_another_order(self: Any, hidden: Tensor) -> Routed:
    logits, weights, experts = own_forward(self, hidden)
    return logits, weights.flip(-1), experts


def other_experts(self: Any, hidden: Tensor) -> Routed:
    logits, weights, experts = own_forward(self, hidden)
    return logits, weights, (experts + 1) % self.num_experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large_weights", [False, True], ids=["small weights", "large weights"])
@pytest.mark.parametrize(
    "forward", [sigmoid_weights, scaled_weights, weights_in_another_order, other_experts]
)
def test_another_routing_rule_is_detected(
    forward: Callable[..., Routed],
    large_weights: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in bfloat16, where rounding may change experts, and attention may hide the change."""
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forward)
    target = make_mixture("qwen3-moe") if large_weights else make_target("qwen3-moe")
    target.model.to(dtype)
    assert isinstance(build_verifier(target, LENGTH), HFPagedTarget)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", ["alpha", "limit"])
def test_another_activation_is_detected(
    constant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patched activation of the GPT-OSS experts."""
    target = make_mixture("gpt-oss")
    own = GptOssExperts._apply_gate

    def apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        original = getattr(self, constant)
        setattr(self, constant, 0.3 * original if constant == "alpha" else 0.2)
        try:
            return own(self, gate_up)
        finally:
            setattr(self, constant, original)

    monkeypatch.setattr(GptOssExperts, "_apply_gate", apply_gate)
    target.model.to(dtype)
    assert isinstance(build_verifier(target, LENGTH), HFPagedTarget)


OTHER_MIXTURES: dict[str, PretrainedConfig] = {
    "phi-moe, another softmax": PhimoeConfig(**SIZES, **MIXTRAL),
    "olmoe, norms over all heads": OlmoeConfig(
        **SIZES | {"head_dim": 8}, num_experts=4, num_experts_per_tok=2
    ),
    "qwen2-moe, a shared expert": Qwen2MoeConfig(
        **SIZES, **MOE, shared_expert_intermediate_size=16
    ),
    "qwen3-moe, GELU": Qwen3MoeConfig(**SIZES, **MOE, hidden_act="gelu"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHER_MIXTURES)
def test_other_mixtures_run_through_transformers(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = OTHER_MIXTURES[name]
    config.num_hidden_layers = 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    target = Target(model.to(dtype), name=name)
    verifier = build_verifier(target, LENGTH)
    assert isinstance(verifier, HFPagedTarget)
    if dtype == torch.float32:
        expected = target.forward(IDS).logits
        torch.testing.assert_close(logits_of(verifier, target), expected, atol=1e-3, rtol=1e-3)

"""benchmarks/vllm/routing.py: weights of vLLM's models as transformers initializes them."""

import pytest
import torch

from benchmarks.vllm.routing import ExpertCounter, fill_weight


@pytest.mark.parametrize(
    ("name", "deviation", "mean"),
    [
        ("model.layers.0.mlp.experts.routed_experts.w13_weight", 0.02, 0),
        ("model.layers.0.mlp.router.bias", 0.02, 0),
        ("model.layers.0.attn.qkv_proj.bias", 0, 0),
        ("model.layers.0.mlp.experts.routed_experts.w2_bias", 0, 0),
        ("model.layers.0.self_attn.q_norm.weight", 0, 1),
        ("model.layers.0.attn.attn._k_scale", 0, 9),  # unchanged
    ],
)
def test_weights_have_the_distribution_of_transformers(
    name: str, deviation: float, mean: float
) -> None:
    weight = torch.full((100, 100), 9.0)
    fill_weight(name, weight, torch.Generator().manual_seed(0))
    assert weight.std().item() == pytest.approx(deviation, abs=5e-4)
    assert weight.mean().item() == pytest.approx(mean, abs=1e-3)


def test_random_layers_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.empty(2, 100).unbind()
    for weight in (first, second):
        fill_weight("model.layers.0.mlp.gate.weight", weight, generator)
    assert not torch.equal(first, second)


def test_an_expert_counter_without_counts_has_no_mean() -> None:
    counter = ExpertCounter()
    assert counter.mean is None
    with counter.counting(8):
        counter.touched += [3, 4]
    assert counter.mean == 3.5 and counter.rows == 0

"""Bytes that a pass of a mixture reads: attention, routers and touched experts."""

from types import SimpleNamespace
from typing import Any

import torch

from peagle.bench.random_models import random_pair
from peagle.bench.step_cost import weight_bytes
from peagle.engine.model.cpu_experts import CpuExperts
from peagle.engine.model.mixture import Mixture, RouterCounters
from peagle.engine.model.weight import Weight
from peagle.engine.step.step_measurements import ExpertLoad, last_expert_load
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation
from peagle.kernels.triton.experts.route import RouterParams
from tests.support.kernels.cpu_features import needs_c

EXPERTS = 4
INNER = 64
HIDDEN = 128
COUNTS = [[3, 0, 1, 0, 2], [1, 1, 1, 1, 4]]


def mixture_layer(value: float) -> Any:
    """A mixture layer whose weights all have this value."""
    gate_up = ExpertMatrices(torch.full((EXPERTS, 2 * INNER, HIDDEN), value))
    down = ExpertMatrices(torch.full((EXPERTS, HIDDEN, INNER), value))
    router = torch.full((EXPERTS, HIDDEN), value)
    counts = torch.zeros(1, EXPERTS + 1, dtype=torch.int32)
    mlp = Mixture(
        router,
        None,
        RouterParams(2, True),
        gate_up,
        down,
        GatedActivation(),
        RouterCounters(counts[0], counts, counts),
        Weight(router),
        CpuExperts(gate_up, down, GatedActivation(), torch.float32),
    )
    qkv, out = (Weight(torch.full((outputs, HIDDEN), value)) for outputs in (256, HIDDEN))
    return SimpleNamespace(qkv=qkv, out=out, mlp=mlp)


def fused_target(value: float, counts: list[list[int]] | None) -> Any:
    tensor = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    return SimpleNamespace(layers=[mixture_layer(value) for _ in range(2)], expert_counts=tensor)


def expected_bytes(per_weight: int) -> int:
    attention = per_weight * (256 + HIDDEN) * HIDDEN
    router = per_weight * EXPERTS * HIDDEN
    expert = per_weight * 3 * INNER * HIDDEN
    return 2 * (attention + router) + (2 + 4) * expert


def test_touched_experts_are_counted() -> None:
    target = fused_target(0.3, COUNTS)  # The value is not exact in bf16, so nothing is packed.
    assert last_expert_load(target) == ExpertLoad(3.0, EXPERTS, expected_bytes(4))


@needs_c
def test_packed_matrices_are_read_in_bf16() -> None:
    load = last_expert_load(fused_target(0.25, COUNTS))
    assert load is not None
    # Outputs are padded to whole panels.
    assert expected_bytes(2) <= load.layer_bytes < 1.25 * expected_bytes(2)


def test_a_dense_target_has_no_expert_load() -> None:
    assert last_expert_load(fused_target(0.25, None)) is None


def test_the_minimum_counts_touched_experts_and_the_head() -> None:
    pair = random_pair("tiny-qwen3-moe", "cpu", torch.float32)
    head = 4 * 512 * 64
    load = ExpertLoad(2.0, 8, 1000)
    assert weight_bytes(pair, "none", 0, load) == 1000 + head
    drafter = weight_bytes(pair, "p-eagle", 3, load) - weight_bytes(pair, "none", 0, load)
    assert drafter == weight_bytes(pair, "p-eagle", 3) - weight_bytes(pair, "none", 0)

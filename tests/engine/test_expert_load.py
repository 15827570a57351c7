"""The bytes that a pass of a mixture reads: attention, routers and the experts that it touched."""

from types import SimpleNamespace
from typing import Any

import torch

from peagle.bench.random_models import random_pair
from peagle.bench.step_cost import weight_bytes
from peagle.engine.model.expert_load import ExpertLoad, last_expert_load
from peagle.engine.model.weight import Weight
from peagle.kernels.expert_matrices import ExpertMatrices

EXPERTS = 4


def mixture_layer() -> Any:
    mlp = SimpleNamespace(
        gate_up=ExpertMatrices(torch.zeros(EXPERTS, 6, 8), bias=torch.zeros(EXPERTS, 6)),
        down=ExpertMatrices(torch.zeros(EXPERTS, 8, 3)),
        packed_router=Weight(torch.zeros(EXPERTS, 8)),
    )
    return SimpleNamespace(qkv=Weight(torch.zeros(16, 8)), out=Weight(torch.zeros(8, 8)), mlp=mlp)


def fused_target(counts: list[list[int]] | None) -> Any:
    tensor = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    return SimpleNamespace(layers=[mixture_layer(), mixture_layer()], expert_counts=tensor)


def test_touched_experts_are_counted() -> None:
    load = last_expert_load(fused_target([[3, 0, 1, 0, 2], [1, 1, 1, 1, 4]]))
    attention = 4 * (16 * 8 + 8 * 8)
    router = 4 * EXPERTS * 8
    expert = 4 * (6 * 8 + 6 + 8 * 3)
    assert load == ExpertLoad(3.0, EXPERTS, 2 * (attention + router) + (2 + 4) * expert)


def test_a_dense_target_has_none() -> None:
    assert last_expert_load(fused_target(None)) is None


def test_the_floor_counts_touched_experts_and_the_head() -> None:
    pair = random_pair("tiny-qwen3-moe", "cpu", torch.float32)
    head = 4 * 512 * 64
    load = ExpertLoad(2.0, 8, 1000)
    assert weight_bytes(pair, "none", 0, load) == 1000 + head
    drafter = weight_bytes(pair, "p-eagle", 3, load) - weight_bytes(pair, "none", 0, load)
    assert drafter == weight_bytes(pair, "p-eagle", 3) - weight_bytes(pair, "none", 0)

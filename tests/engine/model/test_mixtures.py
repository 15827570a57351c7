"""Fused mixtures of experts: every token equals that of `generate` in transformers."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.core import Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.mixture import Mixture
from peagle.engine.model.verifier import build_verifier
from peagle.engine.policy.candidates import candidate_shapes
from peagle.loaded import LoadedPair
from peagle.target import Target, load_target
from peagle.target.experts.stored_experts import StoredExperts
from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.write import quantize
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import EngineRequest, engine_of, steps_of
from tests.support.engine.planting import plant_random
from tests.support.fuzzing.run import RandomPolicy
from tests.support.kernels.cpu_features import needs_c
from tests.support.models.mixtures import (
    MIXTURES,
    generate_all,
    make_mixture,
    mixture_pair,
    round_weights,
)
from tests.support.models.mxfp4_folders import save_mxfp4

COUNT = 14  # tokens of an answer
# Fewer pages than 64 requests need.
CROWDED = {"max_batch": 64, "kv_tokens": 1200, "prefill_chunk": 256}
DRAFTING: dict[str, tuple[Method, dict[str, Any]]] = {
    "none": ("none", {}),
    "p-eagle": ("p-eagle", {"k": 3}),
    "eagle3": ("eagle3", {"k": 2}),
    "adaptive": ("p-eagle", {"k": "auto"}),
    "trees": ("p-eagle", {"k": 4, "tree": 12}),
    # Shapes change randomly from step to step, instead of by measured times.
    "adaptive trees": ("p-eagle", {"k": "auto", "tree": 12}),
}
ALWAYS_TESTED = [("qwen3-moe", "adaptive trees")]


def sixty_four_requests() -> list[EngineRequest]:
    """Prompts of a few lengths, many with common prefixes."""
    rng = random.Random(5)
    common = [rng.randrange(6, 96) for _ in range(16)]
    lengths = [(0, 5), (0, 12), (8, 4), (16, 7)]  # lengths of the common and of the own part
    return [
        (
            common[:shared] + [rng.randrange(6, 96) for _ in range(own)],
            {"max_tokens": COUNT, "ignore_eos": True},
        )
        for shared, own in lengths * 16
    ]


REQUESTS = sixty_four_requests()


@cache
def pair(name: str, device: str = "cpu", rounded: bool = False) -> LoadedPair:
    target = make_mixture(name)
    if rounded:
        round_weights(target)
    target.model.to(device)
    return mixture_pair(target)


@cache
def generated(name: str, device: str = "cpu", rounded: bool = False) -> list[list[int]]:
    return generate_all(pair(name, device, rounded).target, REQUESTS, COUNT)


def answer_all(
    tested_pair: LoadedPair,
    drafting: str,
    right: list[list[int]],
    requests: list[EngineRequest],
    **options: Any,
) -> Any:
    """The answers with planted drafts, so that many are accepted, and the engine."""
    method, settings = DRAFTING[drafting]
    engine = engine_of(tested_pair, method, **CROWDED | settings | options)
    assert isinstance(engine.loop.stepper.verifier, FusedLlamaTarget)
    engine.warm_up()
    if drafting == "adaptive trees":
        engine.loop.drafts.policy = RandomPolicy(candidate_shapes(7, 12), seed=0)
    streams = [engine.add(ids, id=str(i), **more) for i, (ids, more) in enumerate(requests)]
    rng = random.Random(1)
    answers = {str(i): answer for i, answer in enumerate(right)}
    while engine.step():
        engine.check_integrity()
        plant_random(engine, answers, rng)
    return [tokens_of(steps_of(stream)) for stream in streams], engine


def check_sixty_four(name: str, drafting: str, device: str, rounded: bool = False) -> None:
    right = generated(name, device, rounded)
    answers, engine = answer_all(pair(name, device, rounded), drafting, right, REQUESTS)
    assert answers == right
    assert engine.loop.scheduler.preemptions and engine.loop.scheduler.allocator.hit_tokens
    if drafting == "adaptive trees":
        assert len(engine.metrics.k_steps) > 2 and 12 in engine.metrics.k_steps
    if drafting not in ("none", "adaptive"):  # These may run without drafts.
        assert engine.metrics.acceptance_length > 1.3
    assert engine.loop.graphs.enabled == (device == "cuda")


@pytest.mark.parametrize(
    ("name", "drafting"),
    [
        # One mixture is tested with all drafting; the others with chains and trees.
        pytest.param(
            name,
            drafting,
            marks=[]
            if name == "gpt-oss"
            or drafting in ("p-eagle", "trees")
            or (name, drafting) in ALWAYS_TESTED
            else pytest.mark.slow,
        )
        for name in MIXTURES
        for drafting in DRAFTING
    ],
)
def test_sixty_four_requests_equal_generate(name: str, drafting: str) -> None:
    check_sixty_four(name, drafting, "cpu")


@needs_c
@pytest.mark.parametrize("drafting", ["p-eagle", "trees"])
@pytest.mark.parametrize("name", MIXTURES)
def test_weights_of_bfloat16_run_in_c(name: str, drafting: str) -> None:
    verifier = build_verifier(pair(name, rounded=True).target, 64)
    assert isinstance(verifier, FusedLlamaTarget) and verifier.cpu_layers is not None
    check_sixty_four(name, drafting, "cpu", rounded=True)


@pytest.mark.gpu
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("name", MIXTURES)
def test_sixty_four_requests_equal_generate_on_a_gpu(name: str, drafting: str) -> None:
    check_sixty_four(name, drafting, "cuda")


@pytest.mark.parametrize("name", MIXTURES)
def test_answers_vary(name: str) -> None:
    """Otherwise the comparisons would prove little."""
    answers = generated(name)
    assert len({tuple(answer) for answer in answers}) > 50
    assert len({token for answer in answers for token in answer}) > 50


# Stored experts.

FEW_REQUESTS = REQUESTS[:12]


def check_few(target: Target, expected: Target) -> None:
    """The tokens of the engine equal transformers, with and without drafts."""
    right = generate_all(expected, FEW_REQUESTS, COUNT)
    assert len({tuple(answer) for answer in right}) > 8
    assert generate_all(target, FEW_REQUESTS, COUNT) == right
    for drafting in ("none", "p-eagle", "eagle3", "trees"):
        assert answer_all(mixture_pair(target), drafting, right, FEW_REQUESTS)[0] == right


@pytest.mark.parametrize(
    ("name", "width", "format"),
    [("qwen3-moe", "moe_intermediate_size", "fp8"), ("mixtral", "intermediate_size", "int8")],
)
def test_8_bit_experts(name: str, width: str, format: str, tmp_path: Path) -> None:
    make_mixture(name, **{width: 32}).model.save_pretrained(tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / format, WEIGHT_FORMATS[format])
    target = load_target(tmp_path / format, torch.float32, "cpu")
    for module in target.layers:
        assert isinstance(module.mlp.experts, StoredExperts)
    check_few(target, target)
    with Engine(mixture_pair(target), EngineConfig(method="none")) as engine:
        assert engine.weights == f"{format} experts, float32 elsewhere"


def test_mxfp4_experts(tmp_path: Path) -> None:
    """The expected tokens are from the module of transformers, with dequantized weights."""
    model = save_mxfp4(tmp_path, **MIXTURES["gpt-oss"])
    target = load_target(tmp_path, torch.float32, "cpu")
    verifier = build_verifier(target, 64)
    assert isinstance(verifier, FusedLlamaTarget)
    for layer in verifier.layers:
        assert isinstance(layer.mlp, Mixture) and layer.mlp.gate_up.is_mxfp4
    check_few(target, Target(model))

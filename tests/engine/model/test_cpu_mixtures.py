"""Mixtures of experts in the C layers of a CPU."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.core import Method
from peagle.engine import Engine
from peagle.engine.model import weight
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.mixture import Mixture
from peagle.loaded import LoadedPair
from peagle.target import Target, load_target
from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.write import quantize
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import EngineRequest, ask, engine_of, some_requests, steps_of
from tests.support.engine.planting import plant_random
from tests.support.kernels.cpu_features import needs_c
from tests.support.kernels.cpu_levels import levels_and
from tests.support.models.mixtures import (
    MIXTURES,
    VARIANTS,
    generate_all,
    mixture_pair,
    packable_mixture,
)
from tests.support.models.mxfp4_folders import save_mxfp4

pytestmark = needs_c
COUNT = 14  # tokens of an answer
REQUESTS: list[EngineRequest] = some_requests(64, seed=5, max_tokens=COUNT, ignore_eos=True)
FEW = REQUESTS[:10]
CROWDED: dict[str, Any] = {"max_batch": 64, "kv_tokens": 900, "prefill_chunk": 256}
ALL_MIXTURES = VARIANTS | {name: (name, {}) for name in MIXTURES}


def fused(engine: Engine) -> FusedLlamaTarget:
    verifier = engine.loop.stepper.verifier
    assert isinstance(verifier, FusedLlamaTarget)
    return verifier


def answer_all(
    engine: Engine, requests: list[EngineRequest], right: list[list[int]]
) -> list[list[int]]:
    """Answer all requests at once, with planted drafts, so that many are accepted."""
    streams = [engine.add(ids, id=str(i), **more) for i, (ids, more) in enumerate(requests)]
    rng = random.Random(1)
    while engine.step():
        engine.check_integrity()
        plant_random(engine, {str(i): answer for i, answer in enumerate(right)}, rng)
    return [tokens_of(steps_of(stream)) for stream in streams]


CHAIN_AND_TREE: list[tuple[Method, dict[str, Any]]] = [
    ("p-eagle", {}),
    ("p-eagle", {"k": 4, "tree": 12}),
]
ALL_DRAFTING: list[tuple[Method, dict[str, Any]]] = [
    *CHAIN_AND_TREE,
    ("eagle3", {}),
    ("p-eagle", {"exact": True}),
    ("p-eagle", {"exact": True, "k": 4, "tree": 12}),
]


def check_few(
    target: Target,
    expected: Target,
    drafting: list[tuple[Method, dict[str, Any]]] = CHAIN_AND_TREE,
) -> None:
    """Tokens of C layers equal transformers, with and without drafts."""
    right = generate_all(expected, FEW, COUNT)
    assert len({tuple(answer) for answer in right}) > 7
    pair = mixture_pair(target)
    for method, options in (("none", {}), *drafting):
        engine = engine_of(pair, method, **CROWDED | options)
        assert fused(engine).cpu_layers is not None
        assert engine.exact_mode == ("batched" if "exact" in options else None)
        assert answer_all(engine, FEW, right) == right
        assert method == "none" or engine.metrics.acceptance_length > 1.3


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(
    ("cpu_level", "name"), levels_and(list(ALL_MIXTURES), [*MIXTURES]), indirect=["cpu_level"]
)
def test_tokens_equal_generate(name: str) -> None:
    architecture, changes = ALL_MIXTURES[name]
    target = packable_mixture(architecture, **changes)
    check_few(target, target)


@pytest.mark.usefixtures("cpu_level")
def test_mxfp4_experts(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    check_few(load_target(tmp_path, torch.float32, "cpu"), Target(model), ALL_DRAFTING)


@pytest.mark.usefixtures("cpu_level")
def test_quantized_experts_of_layers_that_are_not_packed(tmp_path: Path) -> None:
    """In float32, attention matrices are dequantized, and bf16 cannot represent them exactly."""
    source = packable_mixture("qwen3-moe", moe_intermediate_size=32)
    source.model.save_pretrained(tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "int8", WEIGHT_FORMATS["int8"])
    target = load_target(tmp_path / "int8", torch.float32, "cpu")
    check_packed_experts(mixture_pair(target))


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(
    ("cpu_level", "name"), levels_and([*MIXTURES], ["gpt-oss"]), indirect=["cpu_level"]
)
def test_a_router_that_cannot_be_packed_keeps_its_precision(name: str) -> None:
    target = packable_mixture(name)
    for layer in target.layers:
        mlp: Any = layer.mlp
        router = mlp.router if name == "gpt-oss" else mlp.gate
        router.weight.data *= 1.01
    check_packed_experts(mixture_pair(target))


def check_packed_experts(pair: LoadedPair) -> None:
    """Only the experts run in C, not the rest of the layer."""
    engine = engine_of(pair, "p-eagle", **CROWDED)
    assert fused(engine).cpu_layers is None
    for layer in fused(engine).layers:
        assert isinstance(layer.mlp, Mixture) and layer.cpu_layer is None
        assert layer.mlp.cpu_experts.packed is not None
    # Attention and the router may depend on the batch; the experts do not.
    assert "some of its matrices" in str(fused(engine).use_batch_invariant())
    right = generate_all(pair.target, FEW, COUNT)
    assert answer_all(engine, FEW, right) == right


# Many requests.


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3-moe", torch.float32),
        ("gpt-oss", torch.bfloat16),
        pytest.param("qwen3-moe", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpt-oss", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_sixty_four_requests_equal_single_requests(name: str, dtype: torch.dtype) -> None:
    """With and without exact mode, because the kernels compute rows independently."""
    pair = mixture_pair(packable_mixture(name, dtype))
    plain_engine = engine_of(pair, "none", exact=True, max_batch=1, kv_tokens=600)
    assert plain_engine.exact and plain_engine.loop.stepper.row_multiple == 1
    right = [ask(plain_engine, ids, **more)[0] for ids, more in REQUESTS]
    assert len({tuple(answer) for answer in right}) > 50
    for method, exact in (("p-eagle", True), ("eagle3", False), ("none", False)):
        engine = engine_of(pair, method, exact=exact, **CROWDED)
        assert answer_all(engine, REQUESTS, right) == right
        assert exact or engine.loop.scheduler.preemptions


# int8


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(
    ("cpu_level", "name"), levels_and([*MIXTURES], ["qwen3-moe"]), indirect=["cpu_level"]
)
def test_int8_applies_to_experts_but_not_to_the_router(name: str) -> None:
    target = packable_mixture(name)
    pair = mixture_pair(target)
    plain = engine_of(pair, "none", int8=True, **CROWDED)
    for layer in fused(plain).layers:
        assert isinstance(layer.mlp, Mixture) and layer.cpu_layer is not None
        moe = layer.cpu_layer.matrices.moe
        assert moe is not None and not moe.router.int8_rows
        assert all(matrix.int8_rows for matrix in (*moe.experts.gate_up, *moe.experts.down))
    right = generate_all(target, FEW, COUNT)
    answers = answer_all(plain, FEW, right)
    for method, options in ALL_DRAFTING:
        drafted = engine_of(pair, method, int8=True, **CROWDED | options)
        assert drafted.exact_mode == ("batched" if "exact" in options else None)
        assert answer_all(drafted, FEW, answers) == answers
        assert drafted.metrics.acceptance_length > 1.3
    same = torch.tensor(answers) == torch.tensor(right)
    assert same[:, 0].sum() >= len(FEW) - 2  # Rounding may change later tokens.


# Memory, and the rows of experts.


def test_engines_share_packed_experts() -> None:
    pair = mixture_pair(packable_mixture("gpt-oss"))
    before = len(weight._copies)
    engines = [engine_of(pair, method) for method in ("none", "p-eagle")]
    count = len(weight._copies)
    engines.append(engine_of(pair, "p-eagle", k=2))
    assert len(weight._copies) == count
    first, *others = [packed_experts(engine) for engine in engines]
    assert all(other == first for other in others)
    engines.append(engine_of(pair, "none", int8=True))
    assert not set(packed_experts(engines[-1])) & set(first)
    for engine in engines:
        engine.close()
    assert len(weight._copies) == before


def test_int8_shares_the_codes_of_mxfp4(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    pair = mixture_pair(load_target(tmp_path, torch.float32, "cpu"))
    rounded, plain = (engine_of(pair, "none", int8=int8) for int8 in (True, False))
    assert packed_experts(rounded) == packed_experts(plain)


def packed_experts(engine: Engine) -> list[int]:
    """The addresses of the packed matrices of all experts."""
    mixtures: list[Any] = [layer.mlp for layer in fused(engine).layers]
    experts = [mixture.cpu_experts.packed for mixture in mixtures]
    matrices = [matrix for packed in experts for matrix in (*packed.gate_up, *packed.down)]
    return [matrix.packed[0].data_ptr() for matrix in matrices]


def test_rows_of_experts_are_counted() -> None:
    """The counts of the C layers equal those of PyTorch."""
    pair = mixture_pair(packable_mixture("qwen3-moe"))
    counts: list[torch.Tensor] = []
    for in_c in (True, False):
        engine = engine_of(pair, "p-eagle", **CROWDED)
        verifier = fused(engine)
        if not in_c:
            verifier.cpu_layers = None
            verifier.layers = [replace(layer, cpu_layer=None) for layer in verifier.layers]
        load = engine.expert_load(4, engine.max_shape)
        assert load is not None and 3 <= load.touched <= load.experts == 8
        assert verifier.expert_counts is not None
        counts.append(verifier.expert_counts.clone())
    assert torch.equal(*counts) and counts[0].any()

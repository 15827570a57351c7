"""RoPE that depends on the length of a pass: the engine near the boundary between two factors.

Both verifiers give the answers of the reference for short requests beside long ones, drafts across
the boundary, preemption and the prefix cache.
"""

from typing import Any

import pytest
import torch

from peagle.bench.load.engine_pool import EnginePool
from peagle.core import DRAFTER_METHODS, METHODS, Method
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.regenerate.batch_generator import BatchGenerator, BatchRequest
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    EngineRequest,
    ask,
    engine_of,
    pair_of,
    reference_steps,
    serve,
)
from tests.support.models.rope_models import BOUNDARY, rope_drafter, rope_target

VERIFIERS = {"phi3": HFPagedTarget, "llama": FusedLlamaTarget, "dynamic": FusedLlamaTarget}
CASES = [("phi3", None), ("phi3", BOUNDARY), ("llama", None), ("dynamic", None)]
ROOMY = {"max_batch": 4, "kv_tokens": 600, "prefill_chunk": 512, "prefix_caching": False}


def pair(name: str, context: int | None = None) -> LoadedPair:
    target = rope_target(name, context)
    drafters = {method: rope_drafter(target, method) for method in DRAFTER_METHODS}
    return pair_of(target, drafters)


def ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(6, 96, (length,), generator=generator).tolist()


def near_the_boundary(context: int) -> list[EngineRequest]:
    """Requests before, across and after the boundary, within the context."""
    lengths = (4, BOUNDARY - 8, BOUNDARY - 2, BOUNDARY + 20)
    settings = {"max_tokens": 14, "ignore_eos": True}
    return [(ids(length), settings) for length in lengths if length < context]


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_short_answer_beside_a_long_one(name: str) -> None:
    loaded = pair(name)
    long = ids(min(90, loaded.target.context - 9))
    for seed in range(2):
        short = ids(8, seed)
        single, _ = ask(engine_of(loaded, "none", **ROOMY), short, max_tokens=8, ignore_eos=True)
        engine = engine_of(loaded, "none", **ROOMY)
        streams = [engine.add(x, max_tokens=8, ignore_eos=True) for x in (short, long)]
        engine.drain()
        batched = tokens_of([piece.step for piece in streams[0] if piece.step])
        assert (
            batched
            == single
            == tokens_of(reference_steps(loaded, "none", short, max_tokens=8, ignore_eos=True))
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "context"), CASES)
def test_the_engine_equals_the_reference(name: str, context: int | None, method: Method) -> None:
    """Drafts are compared as well, which tests the RoPE table of the drafter."""
    loaded = pair(name, context)
    engine = engine_of(loaded, method, **ROOMY)
    assert isinstance(engine.loop.stepper.verifier, VERIFIERS[name])
    for prompt, settings in near_the_boundary(loaded.target.context):
        _, pieces = ask(engine, prompt, **settings)
        assert [piece.step for piece in pieces if piece.step] == reference_steps(
            loaded, method, prompt, **settings
        )


@pytest.mark.parametrize("name", VERIFIERS)
def test_drafts_across_the_boundary_do_not_change_answers(name: str) -> None:
    """With dynamic NTK, the boundary is the end of the context, and drafts exceed it."""
    loaded = pair(name)
    plain, drafting = (engine_of(loaded, method, 7, **ROOMY) for method in ("none", "p-eagle"))
    for seed in range(3):
        prompt = ids(BOUNDARY - 18, seed)
        answers = [ask(e, prompt, max_tokens=24, ignore_eos=True)[0] for e in (plain, drafting)]
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "context", "options"),
    [
        *((*case, {}) for case in CASES),
        # Once per verifier without the prefix cache.
        pytest.param("phi3", None, {"prefix_caching": False}, id="phi3-plain"),
        pytest.param("llama", None, {"prefix_caching": False}, id="llama-plain"),
    ],
)
def test_preemption_and_the_prefix_cache(
    name: str, context: int | None, options: dict[str, Any]
) -> None:
    """Requests cross the boundary, are preempted when pages run out, and are recomputed."""
    loaded = pair(name, context)
    settings = {"max_tokens": 32, "ignore_eos": True}
    crossing: list[EngineRequest] = [(ids(BOUNDARY - 28 + n), settings) for n in range(4)]
    expected = [
        tokens_of(reference_steps(loaded, "none", prompt, **settings)) for prompt, _ in crossing
    ]
    engine = engine_of(loaded, "p-eagle", **{"kv_tokens": 110, "prefill_chunk": 24} | options)
    for _ in range(2):  # The prompts of the second run are in the prefix cache.
        assert [tokens_of(steps) for steps in serve(engine, crossing, (0, 1))] == expected
    status = engine.status()
    assert status["preemptions"] > 0
    assert (status["prefix_hits"] > 0) == (not options)


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_another_context_needs_another_target(name: str) -> None:
    loaded = pair(name)
    with pytest.raises(UserError, match="load the pair with a `context` of 40, too"):
        engine_of(loaded, "none", context=40)
    assert engine_of(loaded, "none", context=BOUNDARY + 1).context == BOUNDARY + 1
    assert engine_of(pair(name, 40), "none", context=30).context == 30


@pytest.mark.parametrize("trained_for", [BOUNDARY, None])
@pytest.mark.parametrize("context", [BOUNDARY, None])
def test_the_rope_table_is_that_of_the_drafter(
    context: int | None, trained_for: int | None
) -> None:
    """The RoPE of a drafter is part of its config, and does not depend on the context."""
    drafter = rope_drafter(rope_target("phi3", trained_for))
    cos, sin = drafter.rope(torch.zeros(1), torch.arange(9)[None])  # [1, 9, dims], as in training
    loaded = pair_of(rope_target("phi3", context), {"p-eagle": drafter})
    engine = engine_of(loaded, "p-eagle", **ROOMY)
    assert engine.loop.stepper.drafter is not None
    table = engine.loop.stepper.drafter.layers.rope
    half = table.shape[1] // 2
    assert torch.equal(table[:9, :half], cos[0, :, :half])
    assert torch.equal(table[:9, half:], sin[0, :, :half])


@pytest.mark.parametrize("context", [BOUNDARY, None])
def test_regenerated_answers_equal_the_engine(context: int | None) -> None:
    """The slots are far shorter than the context."""
    loaded = pair("phi3", context)
    generator = BatchGenerator(loaded.target, slots=2, capacity=40, stop_loops=False)
    requests = [BatchRequest(i, ids(10, seed=i), 20) for i in range(3)]
    for answer in generator.run(iter(requests)):
        steps = reference_steps(loaded, "none", ids(10, seed=answer.key), max_tokens=20)
        assert answer.ids == tokens_of(steps)


def test_engines_of_a_benchmark_have_the_targets_rope() -> None:
    """They have the shortest context that fits the load and keeps the frequencies."""
    loaded = pair("phi3")
    pool = EnginePool(loaded, max_batch=2, max_length=12, kv_tokens=64, exact=False)
    assert pool.engine("none", 1).context == BOUNDARY + 1

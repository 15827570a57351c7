"""Engine.replace_drafter: requests continue with the same answers and drafts of the new version."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.replacement import private_copy
from peagle.engine import Engine, EngineConfig
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.drafting import DraftRunner
from peagle.errors import UserError
from peagle.target import Target
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    TIGHT,
    EngineRequest,
    engine_of,
    pair_of,
    reference_steps,
    some_requests,
    steps_of,
)
from tests.support.kernels.cpu_features import needs_c
from tests.support.models.drafter_versions import (
    SHAPES,
    Versions,
    other_version,
    proposals,
    untrained_versions,
    versions,
)
from tests.support.models.tiny_models import make_drafter
from tests.support.waiting import wait_for

COUNT = 30  # tokens of an answer
REQUESTS = some_requests(14, seed=4, max_tokens=COUNT, ignore_eos=True)
PROMPT = [9, 40, 41, 17, 60, 33]


def serve_with_swaps(
    engine: Engine, requests: list[EngineRequest], swap: Callable[[], None], every: int
) -> list[list[int]]:
    """Add a request every second step, and replace the drafter after every `every` steps."""
    waiting = list(requests)
    streams = []
    step = 0
    while waiting or engine.busy:
        if waiting and step % 2 == 0:
            ids, settings = waiting.pop(0)
            streams.append(engine.add(ids, **settings))
        engine.step()
        step += 1
        if step % every == 0:
            swap()
            engine.check_integrity()
    engine.check_integrity()
    assert engine.idle
    return [tokens_of(steps_of(stream)) for stream in streams]


@cache
def answers_of(target: Target) -> list[list[int]]:
    pair = pair_of(target)
    return [tokens_of(reference_steps(pair, "none", ids, **settings)) for ids, settings in REQUESTS]


def without_drafts(each: Versions) -> list[list[int]]:
    return answers_of(each.target)


# --- under load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
def test_answers_stay_the_same(kind: str) -> None:
    each = versions(kind)
    engine = each.engine(each.first, **SHAPES[kind])
    numbers = iter(range(1, 1000))
    drafters = cycle([each.second, each.first])
    answers = serve_with_swaps(
        engine, REQUESTS, lambda: engine.replace_drafter(next(drafters), next(numbers)), every=10
    )
    assert answers == without_drafts(each)
    status = engine.status()
    assert status["drafter_version"] >= 4
    assert status["preemptions"] and status["prefix_hits"]
    assert engine.metrics.finished.total() == len(REQUESTS)


def test_replacement_from_another_thread() -> None:
    """Swaps do not wait until the engine, which runs in its own thread, is idle."""
    each = versions("p-eagle")
    options: dict[str, Any] = {"method": "p-eagle", "k": 4, "thread": True, **TIGHT}
    stopped = threading.Event()
    versions_in_use = []

    def serve_during_three_swaps() -> bool:
        ids, settings = REQUESTS[0]
        steps_of(engine.add(ids, **settings))
        return len(versions_in_use) >= 3

    def replace_often(engine: Engine) -> None:
        for i, drafter in enumerate(cycle([each.second, each.first]), start=1):
            if stopped.is_set():
                return
            engine.replace_drafter(drafter, version=i)
            if engine.busy:
                versions_in_use.append(engine.status()["drafter_version"])

    with Engine(each.pair(each.first), EngineConfig(**options)) as engine:
        thread = threading.Thread(target=replace_often, args=(engine,))
        streams = [engine.add(ids, **settings) for ids, settings in REQUESTS]
        thread.start()
        answers = [tokens_of(steps_of(stream)) for stream in streams]
        wait_for(serve_during_three_swaps)
        stopped.set()
        thread.join()
        engine.check_integrity()
    assert answers == without_drafts(each)


def test_engines_of_a_pair_are_replaced_separately() -> None:
    each = versions("p-eagle")
    pair = each.pair(each.first)
    first, second = (engine_of(pair, "p-eagle", k=4, prefix_caching=False) for _ in range(2))
    old = proposals(first, PROMPT)
    first.replace_drafter(each.second, version=1)
    assert proposals(second, PROMPT) == old
    new = proposals(first, PROMPT)
    second.replace_drafter(each.second, version=1)
    assert new != old and proposals(second, PROMPT) == new
    first.replace_drafter(each.first)  # The first version has not changed.
    assert proposals(first, PROMPT) == old
    assert [engine.status()["drafter_version"] for engine in (first, second)] == [0, 1]


@pytest.fixture
def no_c_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cpu.matrix", "cpu.ops"):
        monkeypatch.setattr(f"peagle.kernels.{module}.library", lambda: None)


# --- drafts of the new version --------------------------------------------------------------------


def check_proposals(each: Versions, **options: Any) -> None:
    """Drafts after a swap equal those of a new engine with the new version."""
    options |= {"prefix_caching": False, "kv_tokens": 600}
    engine = each.engine(each.first, **options)
    old = proposals(engine, PROMPT)
    engine.replace_drafter(each.second)
    new = proposals(engine, PROMPT)
    assert new == proposals(each.engine(each.second, **options), PROMPT)
    assert new != old


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if "adaptive" not in kind])
def test_drafts_equal_those_of_a_new_engine(kind: str) -> None:
    check_proposals(versions(kind), **SHAPES[kind])


@needs_c
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_drafts_with_packed_weights(method: Method, int8: bool) -> None:
    check_proposals(untrained_versions(method, torch.bfloat16), k=3, int8=int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_drafts_without_c_kernels(method: Method, dtype: torch.dtype, no_c_kernels: None) -> None:
    check_proposals(untrained_versions(method, dtype), k=3)


# --- the tensors that CUDA graphs read ------------------------------------------------------------


def tensors_of(
    x: Any, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an object refers to, with its path, except those of the KV cache."""
    seen = set() if seen is None else seen
    if isinstance(x, Tensor):
        yield path, x
        return
    if isinstance(x, KVCache) or id(x) in seen:
        return
    seen.add(id(x))
    children: Any = ()
    if isinstance(x, nn.Module):
        children = [*x.state_dict().items(), *x.named_buffers()]
    elif isinstance(x, dict):
        children = x.items()
    elif is_dataclass(x):
        children = [(field.name, getattr(x, field.name)) for field in fields(x)]
    elif isinstance(x, list | tuple):
        children = enumerate(x)
    elif type(x).__module__.startswith("peagle."):
        children = vars(x).items()
    for name, child in children:
        yield from tensors_of(child, f"{path}.{name}", seen)


def use_as_on_gpu(engine: Engine, drafter: Drafter) -> DraftRunner:
    """Give the engine a runner with its own weights and without draft confidence."""
    stepper = engine.loop.stepper
    assert stepper.drafter is not None
    runner = stepper.drafter.with_drafter(private_copy(drafter, stepper.target))
    runner.has_confidence = False
    runner.confidence_branching = runner.branching
    runner.independent_drafts = drafter.dependency is None
    stepper.drafter = stepper.prefill.drafter = runner
    return runner


def all_weights(each: Versions) -> list[Tensor]:
    drafters = (each.first.state_dict(), each.second.state_dict())
    return [each.target.embedding, *(x for tensors in drafters for x in tensors.values())]


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if "adaptive" not in kind])
def test_weights_are_overwritten_in_place(kind: str, no_c_kernels: None) -> None:
    """CUDA graphs read the weights, so all are replaced, and none may move."""
    each = versions(kind)
    options = SHAPES[kind] | {"prefix_caching": False, "kv_tokens": 600}
    engine, new = (each.engine(drafter, **options) for drafter in (each.first, each.second))
    runner = use_as_on_gpu(engine, each.first)
    expected_runner = use_as_on_gpu(new, each.second)
    old_drafts = proposals(engine, PROMPT)
    before = {path: x.data_ptr() for path, x in tensors_of(runner)}
    kept = [x.clone() for x in all_weights(each)]

    runner.copy_weights(each.second)
    assert {path: x.data_ptr() for path, x in tensors_of(runner)} == before
    assert proposals(engine, PROMPT) == proposals(new, PROMPT) != old_drafts
    after, expected = (dict(tensors_of(x)) for x in (runner, expected_runner))
    assert after.keys() == expected.keys() and len(after) > 12
    assert [path for path, x in expected.items() if not torch.equal(x, after[path])] == []
    assert all(torch.equal(x, y) for x, y in zip(kept, all_weights(each), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{"k": 4}, {"k": 4, "tree": 12}, {"k": "auto"}, {"method": 1}])
def test_graphs_on_cuda(shape: dict[str, Any]) -> None:
    """Graphs that were captured before a swap draft with the new weights."""
    options: dict[str, Any] = {"k": 3} if "method" in shape else dict(shape)
    method: Method = "eagle3" if "method" in shape else "p-eagle"
    each = untrained_versions(method, torch.float32, "cuda")
    expected = without_drafts(untrained_versions(method, torch.float32))
    engine = each.engine(each.first, **options)
    engine.warm_up()
    graphs = len(engine.loop.stepper.graphs)
    assert engine.loop.graphs.enabled and graphs
    drafters = cycle([each.second, each.first])
    answers = serve_with_swaps(engine, REQUESTS, lambda: engine.replace_drafter(next(drafters)), 10)
    assert answers == expected
    assert engine.loop.graphs.enabled and len(engine.loop.stepper.graphs) >= graphs
    if options["k"] != "auto":
        check_graph_proposals(each, **options)


def check_graph_proposals(each: Versions, **options: Any) -> None:
    options |= {"prefix_caching": False, "kv_tokens": 600}
    engine, new = (each.engine(drafter, **options) for drafter in (each.first, each.second))
    for warm in (engine, new):
        warm.warm_up()
    old = proposals(engine, PROMPT)
    engine.replace_drafter(each.second)
    assert proposals(engine, PROMPT) == proposals(new, PROMPT) != old
    engine.replace_drafter(each.first)
    assert proposals(engine, PROMPT) == old


# --- refused drafters -----------------------------------------------------------------------------


def with_config(**changes: Any) -> Callable[[Versions], Drafter]:
    def change(each: Versions) -> Drafter:
        drafter = private_copy(each.second, each.target)
        drafter.config = replace(drafter.config, **changes)
        return drafter

    return change


def other_dtype(each: Versions) -> Drafter:
    return private_copy(each.second, each.target).to(torch.bfloat16)


def own_head(each: Versions) -> Drafter:
    drafter = private_copy(each.second, each.target)
    drafter.lm_head = drafter.lm_head.clone()
    return drafter


def other_method(each: Versions) -> Drafter:
    return make_drafter(each.target, "eagle3", 1, aux=(0, 1, 2))


REFUSED: list[tuple[str, Callable[[Versions], Drafter]]] = [
    ("`method` is eagle3", other_method),
    ("`num_layers` is 7", with_config(num_layers=7)),
    (r"`aux_layer_ids` is \(0, 1, 3\)", with_config(aux_layer_ids=(0, 1, 3))),
    ("`mask_token_id` is 6", with_config(mask_token_id=6)),
    ("`sliding_window` is 80, but the drafter in use has None", with_config(sliding_window=80)),
    ("`draft_vocab_size` is 40", with_config(draft_vocab_size=40)),
    ("`dependency` is 4", with_config(dependency=4)),
    ("tensor .* in bfloat16 on cpu.*: load it for the same target and dtype", other_dtype),
    ("its own lm_head, but the drafter in use shares the target's", own_head),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_another_network_is_refused(message: str, make: Callable[[Versions], Drafter]) -> None:
    each = versions("p-eagle")
    pair = each.pair(each.first)
    engine = engine_of(pair, "p-eagle", k=4, prefix_caching=False)
    old = proposals(engine, PROMPT)
    drafter = make(each)
    with pytest.raises(UserError, match=message):
        engine.replace_drafter(drafter, version=3)
    with pytest.raises(UserError, match=message):
        pair.replace_drafter("p-eagle", drafter)
    assert pair.drafter("p-eagle") is each.first
    assert proposals(engine, PROMPT) == old and engine.status()["drafter_version"] == 0


def test_another_draft_vocabulary_is_refused() -> None:
    each = versions("all parts")
    drafter = private_copy(each.second, each.target)
    assert drafter.target_ids is not None
    drafter.target_ids = drafter.target_ids.flip(0)
    with pytest.raises(UserError, match="`target_ids`, its draft vocabulary, holds other tokens"):
        each.engine(each.first).replace_drafter(drafter)


def test_the_window_of_the_engine_is_kept() -> None:
    """`drafter_window` overrides the window of every version."""
    each = versions("p-eagle")
    options = {"k": 4, "drafter_window": 64, "prefix_caching": False}
    engine = each.engine(each.first, **options)
    engine.replace_drafter(each.second.with_window(90))
    assert proposals(engine, PROMPT) == proposals(each.engine(each.second, **options), PROMPT)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_an_engine_without_a_drafter(method: Method) -> None:
    each = versions("p-eagle")
    with pytest.raises(UserError, match=f"`method` {method} has no drafter to replace"):
        engine_of(each.pair(each.first), method).replace_drafter(each.second)


def test_a_closed_engine() -> None:
    each = versions("p-eagle")
    engine = each.engine(each.first)
    engine.close()
    with pytest.raises(UserError, match="the engine is closed"):
        engine.replace_drafter(each.second)


def test_a_listener_cannot_replace_during_its_step() -> None:
    each = versions("p-eagle")
    engine = each.engine(each.first)
    errors = []

    def listen(*_: Any) -> None:
        with pytest.raises(UserError, match="replace the drafter between two steps") as error:
            engine.replace_drafter(each.second)
        errors.append(error)

    engine.on_step(listen)
    engine.add(PROMPT, max_tokens=8, ignore_eos=True)
    engine.drain()
    assert errors and engine.idle


# --- pairs ----------------------------------------------------------------------------------------


def test_pair_gives_the_new_version_to_new_engines() -> None:
    each = versions("p-eagle")
    pair = each.pair(each.first)
    pair.replace_drafter("p-eagle", each.second)
    options = {"k": 4, "prefix_caching": False}
    expected = proposals(each.engine(each.second, **options), PROMPT)
    assert proposals(engine_of(pair, "p-eagle", **options), PROMPT) == expected


def test_generate_uses_the_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    each = versions("p-eagle")
    pair = each.pair(each.first)
    monkeypatch.setattr(type(pair), "decode", lambda self, ids: "")

    def accepted() -> list[int]:
        answer = pair.generate(PROMPT, k=4, max_tokens=60, method="p-eagle", temperature=1, seed=1)
        return [step.accepted for step in answer.steps]

    before = accepted()
    pair.replace_drafter("p-eagle", other_version(each.first, each.target, noise=1.0))
    assert accepted() != before
    pair.replace_drafter("p-eagle", each.first)
    assert accepted() == before

"""Warm-up: graphs of small batches come first, the others when idle; costs are measured."""

from collections.abc import Hashable
from typing import Any

import pytest
import torch

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine import Engine, EngineConfig
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.step_measurements import graph_costs
from tests.support.bench.benching import tiny_pair
from tests.support.waiting import wait_for


class TimedGraphs(Graphs):
    """Graphs of batches of up to 4 with known times."""

    def milliseconds(self, key: Hashable, repeats: int = 30) -> float | None:
        half, batch, shape, *_ = key  # type: ignore[misc]
        return None if batch > 4 else batch * (1 + 0.1 * shape.nodes) if half == "verify" else 0.5


Captures = list[tuple[int, DraftShape, DraftShape]]


def simulate_graphs(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Captures:
    """Record captures, which a CPU does not support; those of prefills have NO_DRAFT."""
    captures: Captures = []
    loop = engine.loop
    prefill = loop.stepper.prefill
    monkeypatch.setattr(loop.graphs, "enabled", True)
    monkeypatch.setattr(loop.graphs, "capture", lambda *step: captures.append(step))
    monkeypatch.setattr(
        prefill, "capture", lambda size, shape: captures.append((size.requests, NO_DRAFT, shape))
    )
    monkeypatch.setattr(prefill.sizer, "has_graph", lambda chunks: False)
    monkeypatch.setattr(loop.stepper, "graphs", TimedGraphs())
    return captures


def small_engine(thread: bool = False, k: int | str = "auto", max_batch: int = 16) -> Engine:
    config = EngineConfig(method="p-eagle", k=k, max_batch=max_batch, thread=thread)
    return Engine(tiny_pair(), config)


@pytest.mark.parametrize("k", ["auto", 3])
def test_costs_are_known_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, k: int | str
) -> None:
    engine = Engine(tiny_pair(), EngineConfig(method="p-eagle", k=k, max_batch=4, thread=False))
    loop = engine.loop
    stepper = loop.stepper
    simulate_graphs(monkeypatch, engine)
    engine.warm_up()
    assert not engine.capture_next()
    policy = loop.drafts.policy
    if isinstance(policy, AdaptivePolicy):
        assert set(policy.costs.calibrated) == {shape.nodes for shape in policy.candidates}
        assert policy.costs.seconds(4, 7) == pytest.approx((4 * 1.7 + 0.5) / 1000)
        assert not policy.choose(4).reason.startswith("measuring")
    assert (k == "auto") == isinstance(policy, AdaptivePolicy)
    assert graph_costs(stepper, [DraftShape(2, 2)]) == pytest.approx(
        {(b, DraftShape(2, 2)): (b * 1.2 + 0.5) / 1000 for b in (1, 2, 4)}
    )
    engine.close()


def test_small_batches_first_and_the_rest_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    captures = simulate_graphs(monkeypatch, engine)
    engine.warm_up(ready_batch=4)
    assert {batch for batch, *_ in captures} == {1, 4}
    assert all(verified in (drafted, NO_DRAFT) for _, verified, drafted in captures)
    pending = engine.status()["pending_graphs"]
    assert pending > 0
    stream = engine.add("abc", max_tokens=4)
    assert not engine.capture_next(), "graphs must not be captured while a request runs"
    engine.drain()
    assert list(stream) and engine.status()["pending_graphs"] == pending
    del captures[:]
    while engine.capture_next():
        pass
    batches = list(dict.fromkeys(batch for batch, *_ in captures))
    assert batches == [1, 4, 2, 8, 16]  # For 1 and 4, steps that change the shape.
    assert len(set(captures)) < len(captures)  # Prefills of several sizes.
    assert engine.status()["pending_graphs"] == 0
    assert set(engine.status()["startup"]) == {"build", "compile", "capture", "calibrate"}
    engine.close()


def test_no_memory_for_larger_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle captures stop; the engine continues."""
    engine = small_engine()
    simulate_graphs(monkeypatch, engine)
    engine.warm_up(ready_batch=4)

    def capture(*step: Any) -> bool:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine.loop.graphs, "capture", capture)
    assert not engine.capture_next()
    assert engine.status()["pending_graphs"] == 0
    stream = engine.add("abc", max_tokens=4)  # Its steps are not captured.
    engine.drain()
    assert list(stream)
    engine.close()


@pytest.mark.parametrize("max_batch", [16, 20, 40])
def test_prefills_of_all_usual_sizes(monkeypatch: pytest.MonkeyPatch, max_batch: int) -> None:
    """Sizes of prefills differ from those of batches: 20 requests decode as 24, prefill as 32."""
    engine = small_engine(k=3, max_batch=max_batch)
    captures = simulate_graphs(monkeypatch, engine)
    loop = engine.loop
    engine.warm_up()
    captured = [requests for requests, verified, _ in captures if verified == NO_DRAFT]
    usual = loop.stepper.prefill.usual_sizes(max_batch, loop.drafter_shape)
    assert captured == [size.requests for size in usual]
    engine.close()


def test_a_target_without_graphs_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a mixture of experts may synchronize with the host."""
    engine = small_engine()
    attempts: Captures = []

    def capture(*step: Any) -> bool:
        attempts.append(step)
        return False

    monkeypatch.setattr(engine.loop.graphs, "enabled", True)
    monkeypatch.setattr(engine.loop.stepper, "capture", capture)
    engine.warm_up()
    assert len(attempts) == 1 and engine.status()["pending_graphs"] == 0
    engine.close()


def test_costs_of_batches_without_graphs_are_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    simulate_graphs(monkeypatch, engine)
    engine.warm_up(ready_batch=4)
    policy = engine.loop.drafts.policy
    assert isinstance(policy, AdaptivePolicy)
    # Extrapolated from the costs of 2 and 4 requests.
    assert policy.costs.seconds(16, 7) == pytest.approx((16 * 1.7 + 0.5) / 1000)
    assert not policy.choose(16).reason.startswith("measuring")
    engine.close()


@pytest.mark.parametrize("busy", [False, True])
def test_the_thread_captures_pending_graphs(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    engine = small_engine(thread=True, k=3)
    simulate_graphs(monkeypatch, engine)
    engine.warm_up(ready_batch=1)
    if busy:
        assert list(engine.add("abc", max_tokens=4))
    wait_for(lambda: not engine.status()["pending_graphs"])
    engine.close()


def test_no_captures_are_pending_without_graphs() -> None:
    engine = small_engine()
    engine.warm_up(ready_batch=1)
    assert engine.status()["pending_graphs"] == 0 and not engine.capture_next()
    engine.close()
    assert not engine.capture_next()

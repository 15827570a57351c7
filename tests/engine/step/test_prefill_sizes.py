"""Prefills without a CUDA graph of their size are padded to a larger one, with equal answers."""

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.engine import Engine, EngineConfig
from peagle.engine.model.mixture import find_router
from peagle.engine.schedule.prefill_layout import PrefillSize
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.prefill_sizes import PrefillSizer
from peagle.engine.step.stepper import row_weight_count, weight_count
from tests.support.bench.benching import tiny_pair
from tests.support.models.mixtures import make_mixture

PROMPTS = ["abc", "a longer prompt, of some words", "x"]


class RepeatedWork(Graphs):
    """Graphs for a CPU: a replay repeats the captured work on the captured inputs."""

    def warm_up(self, work: Callable[[], Any]) -> None:
        work()

    def capture(self, key: Hashable, work: Callable[[], Any]) -> bool:
        def replay() -> None:
            self.outputs[key] = work()

        replay()
        self.graphs[key] = SimpleNamespace(replay=replay)
        return True


def use_prefill_graphs(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Graphs:
    prefill = engine.loop.stepper.prefill
    run = prefill.run
    graphs = RepeatedWork()
    monkeypatch.setattr(prefill, "graphs", graphs)
    monkeypatch.setattr(prefill, "run", lambda *arguments: run(*arguments[:-1], True))
    return graphs


def answers(engine: Engine) -> list[str]:
    streams = [engine.add(prompt, max_tokens=8) for prompt in PROMPTS]
    engine.drain()
    return ["".join(piece.text for piece in stream) for stream in streams]


@pytest.mark.parametrize("method", ["p-eagle", "eagle3", "none"])
def test_padded_prefills(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    config = EngineConfig(method=method, k=3, max_batch=8, thread=False, prefix_caching=False)
    with Engine(tiny_pair(), config) as plain:
        expected = answers(plain)
    with Engine(tiny_pair(), config) as engine:
        graphs = use_prefill_graphs(monkeypatch, engine)
        prefill = engine.loop.stepper.prefill
        shape = engine.loop.drafter_shape
        large = prefill.sizer._prefill_size(256, 8, 256, shape.k)
        prefill.capture(large, shape)
        captured = set(graphs.graphs)
        assert answers(engine) == expected
        assert set(graphs.graphs) == captured, "a prefill was captured although a larger graph fits"


def test_without_a_larger_size_a_prefill_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(method="p-eagle", k=3, max_batch=8, thread=False, prefix_caching=False)
    with Engine(tiny_pair(), config) as engine:
        graphs = use_prefill_graphs(monkeypatch, engine)
        first = answers(engine)
        captured = set(graphs.graphs)
        assert captured
        assert answers(engine) == first and set(graphs.graphs) == captured


def test_the_smallest_captured_size_is_chosen() -> None:
    config = EngineConfig(method="p-eagle", k=3, max_batch=8, thread=False)
    with Engine(tiny_pair(), config) as engine:
        prefill = engine.loop.stepper.prefill
        shape = engine.loop.drafter_shape
        sizes = [PrefillSize(rows, 4, 2, rows) for rows in (1024, 256, 512)]
        prefill._captured[shape] = sizes
        assert prefill.captured_size(PrefillSize(128, 4, 2, 128), shape) == sizes[1]
        assert prefill.captured_size(PrefillSize(512, 2, 2, 512), shape) == sizes[2]
        too_large = PrefillSize(64, 8, 2, 64)
        assert prefill.captured_size(too_large, shape) == too_large
        other_masks = PrefillSize(64, 1, 3, 64)
        assert prefill.captured_size(other_masks, shape) == other_masks


def test_exact_requests_with_own_passes_are_not_padded() -> None:
    """The number of rows changes bits there, so it must not depend on earlier captures."""
    config = EngineConfig(method="p-eagle", k=3, max_batch=8, thread=False)
    with Engine(tiny_pair(), config) as engine:
        prefill = engine.loop.stepper.prefill
        shape = engine.loop.drafter_shape
        prefill._captured[shape] = [PrefillSize(256, 4, 2, 256)]
        engine.loop.stepper.fix_pass_sizes(8)
        small = PrefillSize(32, 1, 2, 32)
        assert prefill.captured_size(small, shape) == small


def test_a_size_that_would_be_mostly_padding_is_captured() -> None:
    """After a prompt of 1,500 tokens, prompts of 600 tokens get their own graph."""
    sizer = PrefillSizer(None, weights=4_000_000_000)
    assert sizer.max_graph_rows == 1536
    sizes = {rows: PrefillSize(rows, 1, 0, rows) for rows in (16, 64, 128, 768, 1536)}
    assert not sizer.is_padded_cheaply(sizes[768], sizes[1536])
    assert not sizer.is_padded_cheaply(sizes[16], sizes[128])
    assert sizer.is_padded_cheaply(sizes[16], sizes[64])
    assert sizer.is_padded_cheaply(sizes[1536], sizes[1536])
    small = PrefillSizer(None, weights=100_000_000)
    assert small.is_padded_cheaply(sizes[16], sizes[1536])


def test_no_memory_for_the_graphs_of_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill runs without graphs, and later prefills do not try to capture again."""
    config = EngineConfig(method="p-eagle", k=3, max_batch=8, thread=False, prefix_caching=False)
    with Engine(tiny_pair(), config) as engine:
        expected = answers(engine)
        graphs = use_prefill_graphs(monkeypatch, engine)
        attempts: list[Hashable] = []

        def capture(key: Hashable, work: Callable[[], Any]) -> bool:
            attempts.append(key)
            raise torch.OutOfMemoryError

        monkeypatch.setattr(graphs, "capture", capture)
        assert answers(engine) == expected
        assert answers(engine) == expected
        assert len(attempts) == 1


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_row_counts_the_weights_of_its_experts(name: str) -> None:
    layers = make_mixture(name).layers
    num_experts = len(find_router(layers[0].mlp).weight)
    top_k = find_router(layers[0].mlp).top_k
    experts = sum(weight_count(layer.mlp.experts) for layer in layers)
    shared = weight_count(layers) - experts
    assert row_weight_count(layers) == shared + experts * top_k // num_experts
    dense = tiny_pair().target.layers
    assert row_weight_count(dense) == weight_count(dense)


def test_unknown_routers_count_all_experts() -> None:
    """Routers of AFMoE, LongCat-Flash and Zaya have their weights in submodules."""
    mixture = torch.nn.Module()
    mixture.router = torch.nn.Module()
    mixture.router.top_k = 1  # type: ignore[assignment]
    mixture.router.classifier = torch.nn.Linear(8, 4)
    mixture.experts = torch.nn.Linear(8, 16)
    assert row_weight_count(mixture) == weight_count(mixture)

"""Which CUDA graphs are captured before an engine is ready, and which ones steps use."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.draft_shape import DraftShape
from peagle.engine.policy.draft_policy import FixedPolicy
from peagle.engine.step.batch_sizes import graph_keys
from peagle.engine.step.graph_backlog import GraphBacklog, ready_batches
from peagle.engine.step.startup_times import StartupTimes
from peagle.engine.step.stepper import Stepper

CHAIN = DraftShape(3, 3)


def fake_stepper() -> Any:
    prefill = SimpleNamespace(usual_sizes=lambda max_batch, shape: ())
    config = SimpleNamespace(to_dict=dict)
    target = SimpleNamespace(config=config, dtype=torch.float32, format=None)
    return SimpleNamespace(
        prefill=prefill,
        slots=SimpleNamespace(device=torch.device("cpu"), page_size=64),
        batch_invariant=False,
        target=target,
        weights="float32",
        drafter_config=None,
    )


def captured_batches(ready_batch: int | None, max_batch: int) -> tuple[list[int], list[int]]:
    """The batches captured before an engine is ready, and those captured later."""
    backlog = GraphBacklog(fake_stepper(), FixedPolicy(CHAIN), CHAIN, CHAIN, StartupTimes())
    captured: list[int] = []
    backlog.fill(max_batch, ready_batch)
    backlog.run(ready_batch, lambda batch, verify, draft: captured.append(batch))
    before = list(captured)
    while backlog.run_next(lambda batch, verify, draft: captured.append(batch)):
        pass
    return before, captured[len(before) :]


@pytest.mark.parametrize(
    ("ready_batch", "max_batch", "before", "later"),
    [
        (8, 32, [1, 8], [2, 4, 16, 24, 32]),
        (8, 8, [1, 8], [2, 4]),
        (8, 2, [1, 2], []),
        (8, 1, [1], []),
        (0, 4, [], [1, 2, 4]),
        (None, 4, [1, 2, 4], []),
    ],
)
def test_graphs_before_ready(
    ready_batch: int | None, max_batch: int, before: list[int], later: list[int]
) -> None:
    assert captured_batches(ready_batch, max_batch) == (before, later)


def test_kernels_do_not_depend_on_the_order_of_captures() -> None:
    """Early compilation covers the kernels that the warm-up waits for."""
    backlog = GraphBacklog(fake_stepper(), FixedPolicy(CHAIN), CHAIN, CHAIN, StartupTimes())
    descriptions = []
    for ready_batch in (0, 8, None):
        backlog.fill(32, ready_batch)
        descriptions.append(backlog.describe())
    assert len(set(descriptions)) == 1


def test_ready_batches_are_sizes_with_graphs() -> None:
    assert ready_batches(6, 64) == (1, 8)
    assert ready_batches(0, 64) == ()


@pytest.mark.parametrize(
    ("captured", "count", "expected"),
    [
        ((1, 8), 1, 1),
        ((1, 8), 2, 8),  # Two requests fit the graph of eight.
        ((1, 2, 8), 2, 2),
        ((1, 8), 9, None),  # No graph is large enough.
        ((32,), 20, 32),  # 24 x 1.5 = 36.
        ((64,), 20, None),
    ],
)
def test_steps_use_the_next_larger_graph(
    captured: tuple[int, ...], count: int, expected: int | None
) -> None:
    stepper = Stepper.__new__(Stepper)
    keys = [graph_keys(batch, CHAIN, CHAIN)[1] for batch in captured]
    stepper.graphs = dict.fromkeys(keys)  # type: ignore[assignment]
    assert stepper.is_captured(count, CHAIN, CHAIN) == (expected is not None)
    if expected is not None:
        assert stepper.graph_batch(count, CHAIN, CHAIN) == expected

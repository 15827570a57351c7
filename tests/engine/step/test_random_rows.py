"""Steps are timed with rows that differ, as those of real requests do."""

from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine import Engine, EngineConfig
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.step_measurements import graph_costs
from peagle.engine.step.stepper import Stepper
from tests.support.bench.benching import tiny_pair


class RecordedGraphs(Graphs):
    """Records the ids and positions of each timed pass."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__()
        self.stepper = stepper
        self.timed: dict[tuple[int, DraftShape], tuple[Tensor, Tensor, Tensor]] = {}

    def milliseconds(self, key: Hashable, repeats: int = 30) -> float | None:
        half, batch, shape, *_ = key  # type: ignore[misc]
        if batch > 4:
            return None
        slots = self.stepper.slots
        if half == "verify":
            index = self.stepper._slot_indices[batch][1]
            rows, _ = slots.verify_rows(index, shape)
            self.timed[batch, shape] = rows.ids, rows.first_positions, rows.kv_slots
        else:  # Steps change their slots.
            slots.newest.zero_()
            slots.trees.chain.zero_()
            slots.lengths.fill_(1)
        return 1.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(tiny_pair(), EngineConfig(method="p-eagle", k=3, max_batch=4, thread=False))
    stepper = engine.loop.stepper
    monkeypatch.setattr(Stepper, "on_gpu", True)  # On a GPU, the slots of a batch are one tensor.
    monkeypatch.setattr(stepper, "graphs", RecordedGraphs(stepper))
    return engine


def test_calibration_uses_different_rows(engine: Engine) -> None:
    stepper = engine.loop.stepper
    slots = stepper.slots
    before = [tensor.clone() for tensor in (*slots.state, *slots.trees)]
    shapes = [DraftShape(1, 1), DraftShape(3, 3)]
    graph_costs(stepper, shapes)
    assert isinstance(stepper.graphs, RecordedGraphs)
    for (batch, shape), (ids, positions, kv_slots) in stepper.graphs.timed.items():
        rows = batch * (shape.nodes + 1)
        assert ids.numel() == rows and ids.max() < stepper.target.vocab_size
        assert len(ids.unique()) > 0.8 * rows
        assert batch == 1 or len(positions.unique()) > 1
        assert (kv_slots == -1).all()  # KV entries are not stored.
    assert set(stepper.graphs.timed) == {(b, shape) for b in (1, 2, 4) for shape in shapes}
    for tensor, copy in zip((*slots.state, *slots.trees), before, strict=True):
        assert torch.equal(tensor, copy)


def test_steps_are_timed_with_rows_of_the_last_requests(engine: Engine) -> None:
    slots = engine.loop.stepper.slots
    slots.newest[:4] = torch.tensor([5, 6, 7, 8])
    slots.trees.chain[:4, 0] = torch.tensor([1, 2, 3, 4])
    slots.ends.fill_(100)
    shape = DraftShape(1, 1)
    assert engine.time_step(4, shape) == (1.0, 1.0)
    graphs = engine.loop.stepper.graphs
    assert isinstance(graphs, RecordedGraphs)
    ids, _, kv_slots = graphs.timed[4, shape]
    assert ids.tolist() == [[5, 1], [6, 2], [7, 3], [8, 4]]
    assert (kv_slots == -1).all()
    assert slots.newest[:4].tolist() == [5, 6, 7, 8] and slots.ends[0] == 100

"""Before the first request, adaptive drafting knows the cost of steps: its graphs are timed."""

from collections.abc import Hashable

import pytest

from peagle.draft_shape import DraftShape
from peagle.engine import Engine, EngineConfig
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.step.graphs import Graphs
from tests.support.benching import tiny_pair


class Timed(Graphs):
    """Graphs of batches of up to 4, whose milliseconds are known."""

    def milliseconds(self, key: Hashable, repeats: int = 30) -> float | None:
        half, batch, shape, *_ = key  # type: ignore[misc]
        return None if batch > 4 else batch * (1 + 0.1 * shape.nodes) if half == "verify" else 0.5


@pytest.mark.parametrize("k", ["auto", 3])
def test_costs_are_known_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, k: int | str
) -> None:
    engine = Engine(tiny_pair(), EngineConfig(method="p-eagle", k=k, max_batch=4, thread=False))
    loop = engine.loop
    stepper = loop.stepper
    monkeypatch.setattr(loop, "use_graphs", True)
    monkeypatch.setattr(loop, "_capture", lambda *_: None)
    monkeypatch.setattr(stepper.prefill, "capture", lambda *_: None)
    monkeypatch.setattr(stepper, "graphs", Timed())
    engine.warm_up()
    policy = loop.policy
    if isinstance(policy, AdaptivePolicy):
        assert set(policy.costs.calibrated) == {shape.nodes for shape in policy.candidates}
        assert policy.costs.seconds(4, 7) == pytest.approx((4 * 1.7 + 0.5) / 1000)
        assert not policy.choose(4).reason.startswith("measuring")
    assert (k == "auto") == isinstance(policy, AdaptivePolicy)
    assert stepper.graph_costs([DraftShape(2, 2)]) == pytest.approx(
        {(b, DraftShape(2, 2)): (b * 1.2 + 0.5) / 1000 for b in (1, 2, 4)}
    )
    engine.close()

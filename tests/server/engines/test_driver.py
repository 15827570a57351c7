"""The driver thread captures CUDA graphs that are left after the start while the engine is idle."""

import threading
from typing import Any

from peagle.server.engines.driver import Driver


class BacklogEngine:
    """An engine with graphs left to capture, and some steps to run."""

    def __init__(self, graphs: int, steps: int = 0, failing: bool = False) -> None:
        self.graphs = graphs
        self.steps = steps
        self.failing = failing
        self.calls: list[str] = []
        self.done = threading.Event()

    @property
    def busy(self) -> bool:
        return self.steps > 0

    def step(self) -> bool:
        self.calls.append("step")
        self.steps -= 1
        return True

    def capture_next(self) -> bool:
        if self.failing:
            raise RuntimeError("no memory")
        if not self.graphs:
            self.done.set()
            return False
        self.calls.append("capture")
        self.graphs -= 1
        return True


class Slot:
    pending = ()

    def __init__(self, engine: BacklogEngine) -> None:
        self.engine = engine


def run_driver(engine: BacklogEngine) -> list[Exception]:
    failures: list[Exception] = []

    def on_failure(slot: Any, error: Exception) -> None:
        failures.append(error)
        driver.slots.remove(slot)
        engine.done.set()

    driver = Driver(on_failure, lambda error: None)
    driver.slots.append(Slot(engine))  # type: ignore[arg-type]
    driver.start()
    assert engine.done.wait(60)
    driver.stop()
    return failures


def test_steps_come_before_captures() -> None:
    engine = BacklogEngine(graphs=3, steps=2)
    assert run_driver(engine) == []
    assert engine.calls == ["step"] * 2 + ["capture"] * 3


def test_a_failed_capture_is_a_failure_of_the_engine() -> None:
    [error] = run_driver(BacklogEngine(graphs=1, failing=True))
    assert str(error) == "no memory"

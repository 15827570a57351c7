"""What an engine did between two moments: its counters, and the time of a step's two halves."""

import time
from collections.abc import Callable
from typing import Any

from peagle.engine.metrics import Metrics
from peagle.engine.step.stepper import Stepper
from peagle.results.cell import SpecCounters


class CounterSnapshot:
    """The counters of an engine at one moment."""

    def __init__(self, metrics: Metrics) -> None:
        self.spec = SpecCounters(
            metrics.drafts,
            metrics.draft_tokens,
            metrics.accepted_tokens,
            list(metrics.drafted_at),
            list(metrics.accepted_at),
        )
        self.steps, self.seconds, self.k_steps = (
            metrics.steps,
            metrics.step_seconds,
            metrics.k_steps.copy(),
        )

    def minus(self, before: "CounterSnapshot") -> "Steps":
        return Steps(
            self.spec.minus(before.spec),
            self.steps - before.steps,
            self.seconds - before.seconds,
            dict(self.k_steps - before.k_steps),
        )


class Steps:
    def __init__(
        self, spec: SpecCounters, steps: int, seconds: float, k_steps: dict[int, int]
    ) -> None:
        self.spec, self.k_steps = spec, k_steps
        self.step_ms = 1000 * seconds / steps if steps else None


class StepTimings:
    """Seconds in the two halves of a step, where steps are no CUDA graphs: these replay, and are timed as such."""

    def __init__(self, stepper: Stepper) -> None:
        self.on, self.first, self.second = stepper.places.device.type == "cpu", 0.0, 0.0
        self.stepper = stepper
        if self.on:
            vars(stepper).update(
                verify=self._timed("first", stepper.verify),
                settle=self._timed("second", stepper.settle),
            )

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - started)

        return run

    def close(self) -> None:
        if self.on:
            del self.stepper.verify, self.stepper.settle  # the class's own again

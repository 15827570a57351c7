"""Counters of an engine between two moments, and the time of the two halves of its steps."""

from dataclasses import dataclass

from peagle.engine.metrics import Metrics
from peagle.engine.step.step_output import StepRecord
from peagle.results.spec_counters import SpecCounters


@dataclass(frozen=True, slots=True)
class StepCounters:
    """The steps between two snapshots."""

    spec: SpecCounters
    step_ms: float | None  # the mean; None without steps
    k_steps: dict[int, int]  # drafted tokens -> number of steps


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
        self.steps = metrics.steps
        self.seconds = metrics.step_seconds
        self.k_steps = metrics.k_steps.copy()

    def minus(self, before: "CounterSnapshot") -> StepCounters:
        steps = self.steps - before.steps
        seconds = self.seconds - before.seconds
        return StepCounters(
            self.spec.minus(before.spec),
            1000 * seconds / steps if steps else None,
            dict(self.k_steps - before.k_steps),
        )


class StepTimings:
    """Seconds that the steps of an engine spent in verification and in drafting, on a CPU.

    On a GPU both stay 0: steps are CUDA graphs there, and `Engine.time_step` replays them.
    """

    def __init__(self) -> None:
        self.verify_seconds = 0.0
        self.draft_seconds = 0.0

    def add(self, step: StepRecord) -> None:
        self.verify_seconds += step.verify_seconds or 0.0
        self.draft_seconds += step.draft_seconds or 0.0

    @property
    def draft_share(self) -> float | None:
        if not self.draft_seconds:
            return None
        return self.draft_seconds / (self.verify_seconds + self.draft_seconds)

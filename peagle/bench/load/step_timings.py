"""What an engine did between two moments: its counters, and the time of a step's two halves."""

from peagle.engine.metrics import Metrics
from peagle.engine.step.step_output import StepRecord
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

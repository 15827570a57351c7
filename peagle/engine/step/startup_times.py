"""StartupTimes: the seconds that each phase of an engine's start took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartupTimes:
    """Phases: import, load, build (probes, KV cache), exact, compile, capture, calibrate."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - started)

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def add_all(self, other: "StartupTimes") -> None:
        for phase, seconds in other._seconds.items():
            self.add(phase, seconds)

    def as_dict(self) -> dict[str, float]:
        return {phase: round(seconds, 2) for phase, seconds in self._seconds.items()}

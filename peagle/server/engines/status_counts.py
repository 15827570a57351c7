"""StatusCounts: the counters of all engines by name, closed ones included.

A counter of /metrics must never go down, so the counts of a closed engine are kept.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock
from typing import Any

from peagle.server.engines.engine_slot import EngineSlot

# A counter of the engine's status, ("finished", reason) or ("accepted_at", position).
CountKey = str | tuple[str, str] | tuple[str, int]
COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "steps",
    "prefix_queries",
    "prefix_hits",
)


class StatusCounts:
    """Hold `lock` while an engine is removed: until it is kept here and no longer in the pool."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._closed: dict[str, Counter[CountKey]] = {}

    def keep(self, slot: EngineSlot) -> None:
        """Keep the counts of an engine that is removed."""
        with suppress(Exception):  # A broken engine may fail here; its last counts are lost.
            self._closed.setdefault(slot.name, Counter()).update(read_counts(slot))

    def totals(self, slots: Iterable[EngineSlot]) -> dict[str, Counter[CountKey]]:
        """By engine name: the counts of these engines and of the closed ones."""
        totals = {name: Counter(counts) for name, counts in self._closed.items()}
        for slot in slots:
            totals.setdefault(slot.name, Counter()).update(read_counts(slot))
        return totals


def read_counts(slot: EngineSlot) -> Counter[CountKey]:
    status: dict[str, Any] = slot.engine.status()
    counts: Counter[CountKey] = Counter({name: status[name] for name in COUNTERS})
    for reason, count in status["finished"].items():
        counts["finished", reason] = count
    for position, count in enumerate(status["accepted_at"]):
        counts["accepted_at", position] = count
    return counts

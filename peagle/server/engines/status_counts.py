"""StatusCounts: the counters of engines by name, closed ones included.

A counter of /metrics must never go down, so the counts of a closed engine, or of a process that
has ended, are kept.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

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
# By engine name: a name of COUNTERS, "finished:REASON" or "accepted_at:POSITION".
CountsByEngine = Mapping[str, Mapping[str, int]]


class StatusCounts:
    def __init__(self) -> None:
        self._closed: dict[str, Counter[str]] = {}

    def keep(self, counts: CountsByEngine) -> None:
        """Keep the counts of engines that are removed."""
        for name, counter in counts.items():
            self._closed.setdefault(name, Counter()).update(counter)

    def totals(self, counts: CountsByEngine) -> dict[str, Counter[str]]:
        """By engine name: these counts and those of the closed engines."""
        totals = {name: Counter(counter) for name, counter in self._closed.items()}
        for name, counter in counts.items():
            totals.setdefault(name, Counter()).update(counter)
        return totals


def counts_of(status: Mapping[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter({name: status[name] for name in COUNTERS})
    for reason, count in status["finished"].items():
        counts[f"finished:{reason}"] = count
    for position, count in enumerate(status["accepted_at"]):
        counts[f"accepted_at:{position}"] = count
    return counts

"""What engines counted: each by its name, those that are no more included, so that a counter never goes down."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock
from typing import Any

from peagle.server.engines.driver import EngineSlot

COUNTED = (
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


class Tallies:
    """Whoever takes an engine away holds `lock` until it is kept here and not told by itself any more."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._gone: dict[str, Counter[Any]] = {}

    def keep(self, slot: EngineSlot) -> None:
        """Of an engine that goes."""
        with suppress(
            Exception
        ):  # the last counts of an engine in disorder are not worth a second failure
            self._gone.setdefault(slot.name, Counter()).update(counts_of(slot))

    def with_those_of(self, slots: Iterable[EngineSlot]) -> dict[str, Counter[Any]]:
        told = {name: Counter(counts) for name, counts in self._gone.items()}
        for slot in slots:
            told.setdefault(slot.name, Counter()).update(counts_of(slot))
        return told


def counts_of(slot: EngineSlot) -> Counter[Any]:
    """Plain counters by name; (finished, reason) and (accepted_at, position) by two."""
    status = slot.engine.status()
    told: Counter[Any] = Counter({name: status[name] for name in COUNTED})
    told.update({("finished", reason): count for reason, count in status["finished"].items()})
    told.update({("accepted_at", at): count for at, count in enumerate(status["accepted_at"])})
    return told

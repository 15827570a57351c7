"""DIR/events.jsonl: what happened in a learn folder, one JSON line per event."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

EventKind = Literal[
    "stored", "trained", "judged", "promoted", "rejected", "rolled back", "failed", "purged"
]

MAX_EVENT_BYTES = 2048  # of most lines: the newest events are read without the rest of the file


@dataclass(frozen=True, slots=True)
class LearnEvent:
    time: float  # seconds since the epoch
    kind: EventKind
    text: str  # for a reader
    version: int | None = None
    values: dict[str, Any] = field(default_factory=dict)  # figures, such as lengths


def append_event(
    path: Path, kind: EventKind, text: str, version: int | None = None, **values: Any
) -> LearnEvent:
    """Append one line. One write of a file in append mode is not mixed with those of others."""
    event = LearnEvent(time.time(), kind, text, version, values)
    line = {"time": event.time, "kind": kind, "text": text, "version": version, "values": values}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
    return event


def read_events(path: Path, newest: int = 0) -> list[LearnEvent]:
    """The events, the oldest first; only the `newest` ones if given. A torn line is skipped.

    A file that cannot be read has none.
    """
    try:
        lines = read_lines(path, newest * MAX_EVENT_BYTES)
    except OSError:
        return []
    events = []
    for line in lines[-newest:]:
        try:
            events.append(LearnEvent(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return events


def read_lines(path: Path, max_bytes: int) -> list[bytes]:
    """The lines in the last bytes of a file, the first of which may be torn; 0: all lines."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes) if max_bytes else 0)
        return file.read().splitlines()

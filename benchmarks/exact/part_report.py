"""PartReport: records of a measurement in parts, each of which may fail or find no time left."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class PartReport:
    """Prints records as they come, and keeps them in a file."""

    def __init__(self, file: Path, seconds: float) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self.deadline = time.monotonic() + seconds
        self.records: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:
        self.records.append(record)
        print(json.dumps(record), flush=True)
        self.file.write_text(json.dumps(self.records, indent=1))

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.deadline

    def run(self, name: str, part: Callable[[], None]) -> None:
        """A part that fails is reported, and the next one runs."""
        if not self.has_time:
            self.add(part=name, skipped="no time is left")
            return
        started = time.monotonic()
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.add(part=name, failed=repr(error)[:300])
        self.add(part=name, seconds=round(time.monotonic() - started, 1))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

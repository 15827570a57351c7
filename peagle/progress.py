"""How a long pull tells where it stands: a callable, so that the library itself prints nothing."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    pass


@contextmanager
def shown(console: Console, quiet: bool = False) -> Iterator[Progress]:
    """A bar per thing that is under way, in bytes. Nothing is drawn where nothing had to be done."""
    if quiet:
        yield silent
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    bar = Bar(*columns, TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, total: int) -> None:
        bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield progress
    finally:
        if tasks:
            bar.stop()


class watched:
    """While the block runs, reports how many bytes lie below a folder."""

    def __init__(self, folder: Path, what: str, total: int, progress: Progress) -> None:
        self.folder, self.what, self.total, self.progress = folder, what, total, progress
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.thread.join()
        if error[0] is None:
            self.progress(self.what, self.total, self.total)

    def _watch(self) -> None:
        while not self.stopped.wait(0.2):
            self.progress(self.what, min(folder_bytes(self.folder), self.total), self.total)


def folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # unlike rglob, it does not mind folders that vanish
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total

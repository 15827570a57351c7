"""Progress of long work: the library reports to a callable, the CLI passes one that draws bars."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

POLL_SECONDS = 0.2


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of the work named `what`."""


def silent(what: str, done: int, total: int) -> None:
    pass


@contextmanager
def progress_bars(console: "Console", quiet: bool = False) -> Iterator[Progress]:
    """Yield a Progress that draws one bar, in bytes, for each name it is called with."""
    if quiet:
        yield silent
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as ProgressBar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    bar = ProgressBar(*columns, TimeRemainingColumn(), console=console)
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


class FolderProgress:
    """While the block runs, reports the number of bytes in a folder."""

    def __init__(self, folder: Path, what: str, total: int, progress: Progress) -> None:
        self.folder = folder
        self.what = what
        self.total = total
        self.progress = progress
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
        while not self.stopped.wait(POLL_SECONDS):
            self.progress(self.what, min(folder_bytes(self.folder), self.total), self.total)


def folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, it tolerates folders that vanish
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total

"""Locks between the processes that use a learn folder; the end of a process releases its locks.

learner.lock     one trainer at a time, of servers and of `peagle learn from-log`
versions.lock    one change of current.json and of the versions' records at a time
load/ENGINE.bin  the engine process that writes it
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Lock a file until the returned descriptor is closed; None: another process has locked it.

    Where the file system has no locks, the file is only opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        pass
    return file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock, and hold it during the block. It must not be taken again in the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

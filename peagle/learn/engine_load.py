"""EngineLoad: how busy an engine process is, in a file of 24 bytes that a trainer reads.

The engine's thread writes it, some hundred times a second at most. The file is not mapped: a disk
that is full or lost would end the process by SIGBUS. Times are those of the monotonic clock, which
all processes of a machine share.
"""

import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from peagle.learn.file_lock import try_lock
from peagle.learn.folder import LearnFolder

LAYOUT = struct.Struct("<IIdd")
# A process that has not written for this long has ended, or hangs.
STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    engine: str
    running: int
    waiting: int
    last_step: float
    written: float

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        age = time.monotonic() - self.written
        return self.running + self.waiting > 0 and 0 <= age < STALE_SECONDS

    @classmethod
    def read_all(cls, folder: LearnFolder) -> "list[EngineLoad]":
        loads = []
        for path in sorted(folder.load.glob("*.bin")):
            with suppress(OSError, struct.error):  # It is being created, or was removed.
                loads.append(cls(path.stem, *LAYOUT.unpack(path.read_bytes())))
        return loads


class EngineLoadWriter:
    def __init__(self, folder: LearnFolder, engine: str) -> None:
        """Two servers may have engines of the same name: each writes its own file."""
        names = (f"{engine}.{i}.bin" if i else f"{engine}.bin" for i in count())
        files = (try_lock(folder.load / name) for name in names)
        self._file = next(file for file in files if file is not None)
        self.write(0, 0, 0.0)

    def write(self, running: int, waiting: int, last_step: float) -> None:
        """Errors are ignored: nothing here may end a request."""
        with suppress(OSError):
            load = LAYOUT.pack(running, waiting, last_step, time.monotonic())
            os.pwrite(self._file, load, 0)

    def close(self) -> None:
        """Report an idle engine."""
        self.write(0, 0, 0.0)
        os.close(self._file)

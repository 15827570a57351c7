"""EngineLoad: how busy an engine process is, in a file of 24 bytes that a trainer reads.

The engine's thread writes it into a mapped file, without a system call. Times are those of the
monotonic clock, which all processes of a machine share.
"""

import mmap
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from peagle.learn.folder import LearnFolder
from peagle.paths import write_bytes

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
        path = folder.load / f"{engine}.bin"
        # A new file: one that another process has mapped must not be truncated.
        write_bytes(path, bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LAYOUT.size)

    def write(self, running: int, waiting: int, last_step: float) -> None:
        LAYOUT.pack_into(self._map, 0, running, waiting, last_step, time.monotonic())

    def close(self) -> None:
        """Report an idle engine."""
        self.write(0, 0, 0.0)
        self._map.close()

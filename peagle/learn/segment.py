"""SegmentFile: the segments that one engine process appends to; they are bounded and rotated.

A segment is never opened again after a restart or an error: a torn line is always its last.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import list_segments

SEGMENTS_PER_STORE = 16  # Rotation deletes about this part of the oldest documents at a time.
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_bytes: int = 1 << 30
    max_days: float = 30.0

    @property
    def segment_bytes(self) -> int:
        return max(1, self.max_bytes // SEGMENTS_PER_STORE)

    @property
    def segment_seconds(self) -> float:
        """A segment is deleted as a whole: it is closed long before its first document is old."""
        return self.max_days * SECONDS_PER_DAY / SEGMENTS_PER_STORE


class SegmentFile:
    def __init__(self, folder: LearnFolder, engine: str, limits: StoreLimits) -> None:
        self.folder = folder
        self.engine = engine
        self.limits = limits
        self.path: Path | None = None
        self._file = -1
        self._size = 0
        self._opened = 0.0
        self._number = 0

    def append(self, line: bytes) -> None:
        """Append a line. OSError: nothing of it stays, or the segment ends with a torn line."""
        if self._file >= 0 and not self._has_room(len(line)):
            self.close()
        if self._file < 0:
            self._open()
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError:
            with suppress(OSError):
                self._undo()
            self.close()
            raise
        self._size += len(line)

    def prune(self) -> None:
        """Delete segments of all engines that are too old, and the oldest beyond the size."""
        segments = []
        for path in list_segments(self.folder):
            with suppress(FileNotFoundError):
                segments.append((path, path.stat()))
        total = sum(status.st_size for _, status in segments)
        oldest = time.time() - self.limits.max_days * SECONDS_PER_DAY
        for path, status in segments:
            if status.st_mtime < oldest or (total > self.limits.max_bytes and path != self.path):
                path.unlink(missing_ok=True)
                total -= status.st_size

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.path = None

    def _undo(self) -> None:
        """Remove what a failed write has left; on a full disk, segments must not pile up."""
        if self._size == 0 and self.path is not None:
            self.path.unlink(missing_ok=True)
        else:
            os.ftruncate(self._file, self._size)

    def _has_room(self, size: int) -> bool:
        """Whether the segment takes another line; not if it was deleted, as by a purge."""
        return (
            self._size + size <= self.limits.segment_bytes
            and time.monotonic() - self._opened < self.limits.segment_seconds
            and os.fstat(self._file).st_nlink > 0
        )

    def _open(self) -> None:
        if not self.folder.identity.is_file():
            raise OSError(f"{self.folder.identity} was removed: restart the server")
        self.folder.documents.mkdir(exist_ok=True)
        self._number = self._next_number()
        path = self.folder.documents / f"{self.engine}-{self._number:08d}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(path, flags, 0o600)
        self.path = path
        self._size = 0
        self._opened = time.monotonic()
        self.prune()

    def _next_number(self) -> int:
        names = [path.stem for path in self.folder.documents.glob(f"{self.engine}-*.jsonl")]
        numbers = [name.removeprefix(f"{self.engine}-") for name in names]
        return max(self._number, *(int(n) for n in numbers if n.isdigit()), 0) + 1

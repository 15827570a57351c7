"""DocumentCounter: how many documents were stored since the last round, read once each."""

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from peagle.learn.document import is_held_back, parse_header
from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import list_segments
from peagle.learn.training.round_folder import RoundFolder
from peagle.learn.training.round_settings import RoundSettings


@dataclass(slots=True)
class SegmentCounts:
    """What was read of one segment so far."""

    offset: int = 0  # bytes
    times: "array[float]" = field(default_factory=lambda: array("d"))  # of documents to train on
    held_back: set[str] = field(default_factory=set)  # digests of prompts

    def read(self, path: Path, max_bytes: float) -> None:
        """Read what was appended, about `max_bytes` of it."""
        end = self.offset + max_bytes
        with path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n") or self.offset >= end:
                    break  # It is being written, or it is read the next time.
                self.offset += len(line)
                header = parse_header(line)
                if header is None:
                    continue
                if is_held_back(header.id):
                    self.held_back.add(header.prompt_digest)
                else:
                    self.times.append(header.time)


class DocumentCounter:
    def __init__(self, folder: LearnFolder) -> None:
        self.folder = folder
        self.rounds = RoundFolder(folder)
        self.segments: dict[Path, SegmentCounts] = {}
        self.new = 0  # documents to train on that are newer than the last round
        self.held_back = 0  # prompts that judge, of any age
        self._read: object = None  # cursor and offsets that the counts are of

    def update(self, max_bytes: float = float("inf")) -> None:
        """Read what was appended, about `max_bytes` at most; forget segments that were deleted."""
        paths = list_segments(self.folder)
        self.segments = {path: self.segments.get(path, SegmentCounts()) for path in paths}
        for path, counts in self.segments.items():
            before = counts.offset
            with suppress(FileNotFoundError):
                counts.read(path, max_bytes)
            max_bytes -= counts.offset - before
        cursor = self.rounds.read_cursor()
        read = cursor, [(path, counts.offset) for path, counts in self.segments.items()]
        if read != self._read:
            self._read = read
            segments = self.segments.values()
            self.new = sum(int((np.array(counts.times) > cursor).sum()) for counts in segments)
            self.held_back = len(set().union(*(counts.held_back for counts in segments)))

    def is_enough(self, settings: RoundSettings) -> bool:
        """Whether a round may begin."""
        return self.new >= settings.min_documents and self.held_back >= settings.min_held_back

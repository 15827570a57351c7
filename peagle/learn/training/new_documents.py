"""DocumentCounter: how many documents were stored since the last round, read once each."""

from collections import Counter
from contextlib import suppress
from pathlib import Path

from peagle.learn.document import is_held_back, parse_document
from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import list_segments
from peagle.learn.training.round_folder import RoundFolder
from peagle.learn.training.round_settings import RoundSettings


class DocumentCounter:
    def __init__(self, folder: LearnFolder) -> None:
        self.folder = folder
        self.rounds = RoundFolder(folder)
        self.offsets: Counter[Path] = Counter()  # bytes that were read of each segment
        self.cursor = 0.0
        self.new = 0  # documents to train on that are newer than the cursor
        self.held_back = 0  # documents that judge, of any age

    def update(self) -> None:
        """Read what was appended; begin again if a round has moved the cursor."""
        cursor = self.rounds.read_cursor()
        if cursor != self.cursor:
            self.offsets.clear()
            self.cursor = cursor
            self.new = self.held_back = 0
        for path in list_segments(self.folder):
            with suppress(FileNotFoundError):
                self._read(path)

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self.offsets[path])
            for line in file:
                if not line.endswith(b"\n"):
                    break  # It is being written.
                self.offsets[path] += len(line)
                document = parse_document(line)
                if document is None:
                    continue
                if is_held_back(document.id):
                    self.held_back += 1
                elif document.time > self.cursor:
                    self.new += 1

    def is_enough(self, settings: RoundSettings) -> bool:
        """Whether a round may begin."""
        return self.new >= settings.min_documents and self.held_back >= settings.min_held_back

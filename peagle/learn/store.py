"""StoreWriter: writes documents behind the answers, on a thread of its own.

`add` never blocks and never raises: a document that cannot be stored is dropped and counted. When
a write fails, as on a full disk, the reason is reported once, and storing goes on when it succeeds
again.
"""

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peagle.learn.document import StoredDocument, encode_line, new_document
from peagle.learn.folder import LearnFolder
from peagle.learn.segment import SegmentFile, StoreLimits

MAX_QUEUED_DOCUMENTS = 1024
MAX_QUEUED_TOKENS = 1 << 22
PRUNE_SECONDS = 60.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What became of the documents of one engine process."""

    documents: int = 0
    tokens: int = 0
    dropped: int = 0  # The queue was full, or the write failed.
    failure: str | None = None  # Why the last write failed; None: it succeeded.


class StoreWriter:
    def __init__(
        self,
        folder: LearnFolder,
        engine: str,
        limits: StoreLimits | None = None,
        *,
        share: float = 1.0,
        report: Report = print,
    ) -> None:
        """`share`: fraction of the documents that is stored. `report` gets failures, once each."""
        self.share = share
        self.segment = SegmentFile(folder, engine, limits or StoreLimits())
        self._report = report
        self._queue: queue.Queue[tuple[Sequence[int], Sequence[int]] | None] = queue.Queue(
            MAX_QUEUED_DOCUMENTS
        )
        self._added_tokens = 0  # Each counter is written by one thread only.
        self._taken_tokens = 0
        self._refused = 0  # Documents that found the queue full.
        self._written = StoreCounts()  # Replaced as a whole, by the thread that writes.
        self._random = random.Random()
        self._thread = threading.Thread(target=self._run, name="peagle-store", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> StoreCounts:
        written = self._written
        return replace(written, dropped=written.dropped + self._refused)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Store a request and its answer later. The lists must not change any more."""
        if not answer or self._random.random() >= self.share:
            return
        if self._added_tokens - self._taken_tokens > MAX_QUEUED_TOKENS:
            self._refused += 1
            return
        try:
            self._queue.put_nowait((prompt, answer))
            self._added_tokens += len(prompt) + len(answer)
        except queue.Full:
            self._refused += 1

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued, and end the thread."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                entry = self._queue.get(timeout=PRUNE_SECONDS)
            except queue.Empty:
                self._attempt(self.segment.prune)
                continue
            if entry is None:
                self.segment.close()
                return
            self._taken_tokens += len(entry[0]) + len(entry[1])
            self._store(new_document(*entry, self.segment.engine))

    def _store(self, document: StoredDocument) -> None:
        line = encode_line(document)
        if self._attempt(lambda: self.segment.append(line)):
            written = self._written
            self._written = replace(
                written,
                documents=written.documents + 1,
                tokens=written.tokens + document.tokens,
            )
        else:
            self._written = replace(self._written, dropped=self._written.dropped + 1)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Return whether the action succeeded; report the first failure and the end of failures."""
        try:
            action()
        except OSError as error:
            if self._written.failure is None:
                self._report(f"documents are not stored: {error}")
            self._written = replace(self._written, failure=str(error))
            return False
        if self._written.failure is not None:
            self._written = replace(self._written, failure=None)
            self._report("documents are stored again")
        return True

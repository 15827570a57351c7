"""Import the log of an OpenAI-compatible server into the store of a learn folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.data.records import Report, ignore, read_records
from peagle.errors import UserError
from peagle.learn.document import new_document
from peagle.learn.folder import LearnFolder
from peagle.learn.offline.log_record import BatchLines, Exchange, encode_exchange
from peagle.learn.segment import SegmentFile, StoreLimits
from peagle.learn.store import encode_line
from peagle.learn.store_reader import read_documents
from peagle.target import Target

LIMITS = StoreLimits(max_bytes=1 << 40, max_days=36_500.0)  # A log is imported as a whole.


@dataclass(slots=True)
class ImportCounts:
    lines: int = 0
    documents: int = 0
    known: int = 0  # documents that the store has already
    skipped: int = 0  # lines that cannot be used


class LogImport:
    def __init__(self, folder: LearnFolder, target: Target, report: Report = ignore) -> None:
        """`report` gets a line for every record that cannot be used."""
        self.target = target
        self.report = report
        self.counts = ImportCounts()
        self.batch = BatchLines()
        self.known = {document.id for document in read_documents(folder)}
        self.segment = SegmentFile(folder, "log", LIMITS)

    def read(self, logs: Sequence[Path], progress: Callable[[int], None] = lambda _: None) -> None:
        """Import all logs; `progress` gets the number of lines so far."""
        for log in logs:
            for number, record in read_records(log, self._skip):
                self.counts.lines += 1
                self._read_record(f"{log}:{number}", record)
                progress(self.counts.lines)
        self.segment.close()
        if unmatched := len(self.batch.requests) + len(self.batch.responses):
            self._skip(f"{unmatched} requests or responses of batches lack their other half")
        if not self.counts.documents and not self.counts.known:
            names = ", ".join(map(str, logs))
            raise UserError(
                f"{names}: no answered request ({self.counts.skipped} lines skipped). A line is"
                ' {"request": {...}, "response": {...}} with the bodies of an OpenAI API'
            )

    def _read_record(self, place: str, record: dict[str, Any]) -> None:
        try:
            exchange = self.batch.exchange(record)
            if exchange is not None:
                self._add(exchange)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._skip(f"{place}: skipped, {error}")

    def _add(self, exchange: Exchange) -> None:
        for prompt, answer in encode_exchange(self.target, exchange):
            document = new_document(prompt, answer, "log")
            if document.id in self.known:
                self.counts.known += 1
                continue
            self.segment.append(encode_line(document))
            self.known.add(document.id)
            self.counts.documents += 1

    def _skip(self, line: str) -> None:
        self.counts.skipped += 1
        self.report(line)

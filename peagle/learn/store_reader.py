"""Reading the documents of a folder, and deleting them."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peagle.learn.document import DocumentHeader, StoredDocument, parse_document, parse_header
from peagle.learn.folder import LearnFolder

SEGMENT_PATTERN = "*.jsonl"


@dataclass(frozen=True, slots=True)
class StoreSize:
    segments: int = 0
    bytes: int = 0


def read_documents(folder: LearnFolder, after: float = 0.0) -> Iterator[StoredDocument]:
    """Yield the documents that were stored after a time, by segment, oldest segment first.

    Torn lines are skipped. A segment that is deleted meanwhile ends without an error. A cursor is
    the largest time of the documents that were read.
    """
    for path in list_segments(folder):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime >= after:
                yield from (d for d in read_segment(path) if d.time > after)


def read_segment(path: Path) -> Iterator[StoredDocument]:
    with path.open("rb") as lines:
        for line in lines:
            document = parse_document(line)
            if document is not None:
                yield document


def read_headers(folder: LearnFolder) -> Iterator[DocumentHeader]:
    """Yield the headers of all documents, oldest segment first."""
    for path in list_segments(folder):
        with suppress(FileNotFoundError), path.open("rb") as lines:
            yield from filter(None, map(parse_header, lines))


def list_segments(folder: LearnFolder) -> list[Path]:
    """The segments of all engines, oldest first."""
    segments = []
    for path in folder.documents.glob(SEGMENT_PATTERN):
        with suppress(OSError):  # It was deleted just now, or cannot be read.
            segments.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(segments)]


def store_size(folder: LearnFolder) -> StoreSize:
    sizes = []
    for path in list_segments(folder):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return StoreSize(len(sizes), sum(sizes))


def purge_documents(folder: LearnFolder) -> StoreSize:
    """Delete all documents; a server that runs begins new segments. Return what was deleted."""
    size = store_size(folder)
    for path in list_segments(folder):
        path.unlink(missing_ok=True)
    return size

"""The store of answered requests: size limits, retention, failed writes, purge, identity."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import UserError
from peagle.learn import store
from peagle.learn.document import (
    StoredDocument,
    document_id,
    encode_line,
    is_held_back,
    new_document,
)
from peagle.learn.folder import LearnFolder, StoreIdentity, target_identity
from peagle.learn.segment import SegmentFile, StoreLimits
from peagle.learn.store import StoreWriter
from peagle.learn.store_reader import list_segments, purge_documents, read_documents, store_size
from tests.support.waiting import wait_for

IDENTITY = StoreIdentity("tiny", "main", 96, "0123")


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    folder = LearnFolder(tmp_path / "learn")
    folder.open(IDENTITY)
    return folder


@contextmanager
def writing(folder: LearnFolder, **options: Any) -> Iterator[StoreWriter]:
    """A writer whose documents are all on disk at the end of the block."""
    writer = StoreWriter(folder, "engine", report=lambda _: None, **options)
    try:
        yield writer
    finally:
        writer.close()


def answers(folder: LearnFolder, after: float = 0.0) -> list[list[int]]:
    return [document.answer for document in read_documents(folder, after)]


def fill(folder: LearnFolder, count: int, limits: StoreLimits) -> SegmentFile:
    segment = SegmentFile(folder, "engine", limits)
    for i in range(count):
        segment.append(encode_line(new_document([1, 2, 3], [i], "engine")))
    return segment


def test_documents_are_written_and_read(folder: LearnFolder) -> None:
    long_prompt = list(range(5000))
    with writing(folder) as writer:
        writer.add(long_prompt, [7, 8])
        writer.add([1], [])  # An empty answer is not stored.
        writer.add([1], (9,))
    first, second = read_documents(folder)
    assert (first.prompt, first.answer, first.engine) == (long_prompt, [7, 8], "engine")
    assert (second.prompt, second.answer) == ([1], [9])
    assert first.id == document_id(long_prompt, [7, 8])
    assert abs(first.time - time.time()) < 60
    assert (writer.counts.documents, writer.counts.tokens) == (2, 5004)
    line = json.loads(list_segments(folder)[0].read_bytes().splitlines()[1])
    # neither user, key nor request
    assert line.keys() == {"id", "time", "engine", "prompt", "answer"}


def test_documents_after_a_cursor(folder: LearnFolder) -> None:
    segment = SegmentFile(folder, "engine", StoreLimits())
    now = time.time()
    for i in range(4):
        document = StoredDocument(str(i), now + i, [1], [i])
        segment.append(encode_line(document))
    os.utime(list_segments(folder)[0], (now + 3, now + 3))
    assert answers(folder, now + 1) == [[2], [3]]
    assert answers(folder, now + 3) == []


def test_all_answers_to_a_prompt_are_in_the_same_split() -> None:
    sides = [is_held_back(document_id([i], [5])) for i in range(1000)]
    assert 150 < sum(sides) < 250
    assert all(is_held_back(document_id([i], [6])) == side for i, side in enumerate(sides))


def test_the_size_is_bounded(folder: LearnFolder) -> None:
    limits = StoreLimits(max_bytes=16_000)
    fill(folder, 400, limits)
    segments = list_segments(folder)
    assert 10 < len(segments) <= 24
    assert store_size(folder).bytes <= limits.max_bytes + limits.segment_bytes
    kept = [document[0] for document in answers(folder)]
    assert kept == list(range(kept[0], 400))  # The oldest documents are deleted.
    assert kept[0] > 0


def test_old_segments_are_deleted(folder: LearnFolder) -> None:
    fill(folder, 3, StoreLimits()).close()
    (old,) = list_segments(folder)
    age = time.time() - 2 * 86_400
    os.utime(old, (age, age))
    SegmentFile(folder, "other", StoreLimits(max_days=3)).prune()
    assert old.exists()
    SegmentFile(folder, "other", StoreLimits(max_days=1)).prune()
    assert not old.exists()


def test_a_segment_is_closed_before_its_first_document_is_old(folder: LearnFolder) -> None:
    limits = StoreLimits(max_days=1e-9)
    segment = fill(folder, 1, limits)
    first = segment.path
    segment.append(encode_line(new_document([1], [2])))
    assert segment.path != first


def test_a_torn_line_is_skipped(folder: LearnFolder) -> None:
    fill(folder, 2, StoreLimits()).close()
    (path,) = list_segments(folder)
    with path.open("ab") as file:
        # as if the process was killed while writing
        file.write(b'{"id": "x", "time": 1, "prompt": "BwAA')
    other = SegmentFile(folder, "engine", StoreLimits())
    other.append(encode_line(new_document([1], [5])))
    assert answers(folder) == [[0], [1], [5]]
    assert other.path is not None and other.path.name == "engine-00000002.jsonl"


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'{"id": "x"}',
        b'{"id": "x", "time": 1, "prompt": [1], "answer": [1]}',
        b'{"id": "x", "time": 1, "prompt": "BwAAAA==", "answer": ""}',
        b'{"id": "x", "time": 1, "prompt": "BwAAAA==", "answer": "BwAA"}',
        b'{"id": "x", "time": 1, "prompt": "BwAAAA==", "answer": "?"}',
        b'{"id": "x", "time": 1, "prompt": "BwAAAA==", "answer": "BwAAAA==", "user": "me"}',
    ],
)
def test_invalid_lines_are_skipped(folder: LearnFolder, line: bytes) -> None:
    (folder.documents / "engine-00000001.jsonl").write_bytes(line + b"\n")
    assert answers(folder) == []


def test_documents_are_dropped_while_the_disk_is_full(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are dropped and counted, the reason is reported once, and storing resumes."""
    reports: list[str] = []
    write = os.write
    is_full = True

    def write_half(file: int, line: bytes) -> int:
        if is_full:
            write(file, line[: len(line) // 2])
            raise OSError(28, "No space left on device")
        return write(file, line)

    monkeypatch.setattr(os, "write", write_half)
    writer = StoreWriter(folder, "engine", report=reports.append)
    for i in range(3):
        writer.add([1], [i])
    wait_for(lambda: writer.counts.dropped == 3)
    assert writer.counts.failure is not None
    assert list_segments(folder) == []  # Failed writes leave no files.
    is_full = False
    writer.add([1], [9])
    writer.close()
    assert answers(folder) == [[9]]
    assert (writer.counts.documents, writer.counts.failure) == (1, None)
    assert len(reports) == 2 and "No space left" in reports[0] and "again" in reports[1]


def test_a_folder_deleted_while_a_server_writes(folder: LearnFolder) -> None:
    """The folder is not recreated without its identity, because the next start would refuse it."""
    with writing(folder) as writer:
        writer.add([1], [2])
        wait_for(lambda: writer.counts.documents == 1)
        shutil.rmtree(folder.root)
        writer.add([1], [3])
        wait_for(lambda: writer.counts.dropped == 1)
        assert "store.json was removed" in str(writer.counts.failure)
        folder.open(IDENTITY)
        writer.add([1], [4])
    assert answers(folder) == [[4]] and writer.counts.failure is None


def test_a_full_queue_drops_documents(folder: LearnFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_QUEUED_TOKENS", 5)
    monkeypatch.setattr(StoreWriter, "_run", lambda self: None)  # The queue is never read.
    writer = StoreWriter(folder, "engine")
    for _ in range(4):
        writer.add([1, 2], [3])
    assert writer.counts.dropped == 2  # The limit is checked before a document is added.


def test_the_requested_share_is_stored(folder: LearnFolder) -> None:
    with writing(folder, share=0.25) as writer:
        writer._random.seed(0)
        for i in range(400):
            writer.add([1], [i])
    assert 60 < writer.counts.documents < 140
    assert writer.counts.dropped == 0


def test_purge_while_a_server_writes(folder: LearnFolder) -> None:
    segment = fill(folder, 5, StoreLimits())
    deleted = purge_documents(folder)
    assert (deleted.segments, store_size(folder).segments) == (1, 0)
    assert deleted.bytes > 0 and answers(folder) == []
    segment.append(encode_line(new_document([1], [6])))
    assert answers(folder) == [[6]]


def test_documents_are_private_files(folder: LearnFolder) -> None:
    segment = fill(folder, 1, StoreLimits())
    assert segment.path is not None and segment.path.stat().st_mode & 0o077 == 0


def test_a_folder_belongs_to_one_target(folder: LearnFolder, tmp_path: Path) -> None:
    folder.open(StoreIdentity("copy", None, 96, "0123"))  # the same files under another name
    before = folder.identity.read_bytes()
    with pytest.raises(UserError, match=r"answers of the target 'tiny'.*use another folder"):
        folder.open(StoreIdentity("other", "main", 96, "4567"))
    assert folder.identity.read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", '{"target": "tiny"}'])
def test_a_broken_identity_is_an_error(folder: LearnFolder, content: str) -> None:
    folder.identity.write_text(content)
    with pytest.raises(UserError, match=r"store\.json is broken"):
        folder.open(IDENTITY)
    assert folder.identity.read_text() == content


def test_documents_without_an_identity_are_refused(folder: LearnFolder) -> None:
    fill(folder, 1, StoreLimits())
    folder.identity.unlink()
    with pytest.raises(UserError, match=r"documents but no store\.json"):
        folder.open(IDENTITY)
    assert answers(folder) == [[0]]


def test_a_folder_of_a_later_format_is_refused(folder: LearnFolder) -> None:
    values = json.loads(folder.identity.read_text())
    folder.identity.write_text(json.dumps(values | {"format": 2}))
    with pytest.raises(UserError, match="has format 2"):
        folder.open(IDENTITY)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use"):
        LearnFolder(tmp_path / "file" / "learn").open(IDENTITY)


def test_the_identity_of_a_target_depends_on_its_files(tmp_path: Path) -> None:
    def digest(name: str, config: str = "{}", weights: bytes = b"1" * 200_000) -> str:
        target = tmp_path / name
        target.mkdir()
        (target / "config.json").write_text(config)
        (target / "model.safetensors").write_bytes(weights)
        (target / "README.md").write_text(name)
        return target_identity(target, name, None, 96).digest

    first = digest("a")
    assert digest("copy") == first
    assert digest("b", config="[]") != first
    assert digest("c", weights=b"1" * 199_999) != first
    assert digest("d", weights=b"1" * 100_000 + b"2" + b"1" * 99_999) != first

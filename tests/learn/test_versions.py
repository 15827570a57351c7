"""Versions: records, the current version, rollback to a parent, pruning of old weights."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.learn import promotion
from peagle.learn.events import MAX_EVENT_BYTES, append_event, read_events, read_lines
from peagle.learn.folder import LearnFolder
from peagle.learn.promotion import promote_candidates
from peagle.learn.versions import (
    CurrentVersion,
    LengthComparison,
    VersionRecord,
    check_base,
    list_versions,
    prune_versions,
    read_current,
    read_version,
    rollback,
    set_current,
    version_folder,
    write_current,
    write_version,
)

COMPARISON = LengthComparison(k=7, documents=30, before=2.0, after=2.5, low=1.2, high=1.3)


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    return LearnFolder(tmp_path)


def add(folder: LearnFolder, number: int, parent: int, **changes: object) -> VersionRecord:
    record = VersionRecord(
        number, parent, 1.0, "p-eagle", "base", "promoted", "it won", held_back=COMPARISON
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    write_version(folder, record)
    (version_folder(folder, number) / "model.safetensors").write_bytes(b"weights")
    return record


def test_the_pair_has_version_0(folder: LearnFolder) -> None:
    assert read_current(folder) == CurrentVersion()
    assert list_versions(folder) == []
    with pytest.raises(UserError, match="current one already"):
        rollback(folder)


def test_a_record_is_read_as_it_was_written(folder: LearnFolder) -> None:
    record = add(folder, 1, 0)
    assert read_version(folder, 1) == record
    assert record.held_back is not None and record.held_back.ratio == 1.25


@pytest.mark.parametrize("content", ["{", "[]", "1", '{"number": 2}'])
def test_a_broken_record_is_skipped(folder: LearnFolder, content: str) -> None:
    record = add(folder, 1, 0)
    add(folder, 2, 1)
    (version_folder(folder, 2) / "version.json").write_text(content)
    assert list_versions(folder) == [record]


def test_the_newest_events_are_read_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path, 3) == read_events(tmp_path) == []  # a missing file, and a folder
    for i in range(500):
        append_event(path, "trained", f"{i} " + 100 * "x")
    assert [event.text.split()[0] for event in read_events(path, 3)] == ["497", "498", "499"]
    assert len(read_events(path)) == 500 and len(read_lines(path, 3 * MAX_EVENT_BYTES)) < 100


def test_only_a_version_with_weights_becomes_current(folder: LearnFolder) -> None:
    add(folder, 1, 0)
    with pytest.raises(UserError, match="has no version 2: it has 0"):
        set_current(folder, 2, "test")
    (version_folder(folder, 1) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="weights of version 1 were removed"):
        set_current(folder, 1, "test")
    assert read_current(folder).number == 0


def test_rollback_marks_the_versions_it_abandons(folder: LearnFolder) -> None:
    for number in (1, 2, 3):
        add(folder, number, number - 1)
    set_current(folder, 3, "test")
    assert rollback(folder).number == 2
    assert rollback(folder, 0).number == 0
    states = [record.state for record in list_versions(folder)]
    assert states == ["rolled back", "rolled back", "rolled back"]


def test_a_broken_current_file_is_an_error_with_a_fix(folder: LearnFolder) -> None:
    folder.current.write_text("{")
    with pytest.raises(UserError, match="remove it to use the drafter of the pair"):
        read_current(folder)


def test_a_rollback_to_a_newer_version_marks_nothing(folder: LearnFolder) -> None:
    for number in (1, 2, 3):
        add(folder, number, parent=number - 1)
    set_current(folder, 1, "a test")
    assert rollback(folder, 3).number == 3
    assert [record.state for record in list_versions(folder)] == ["promoted"] * 3


def test_pruning_keeps_versions_that_a_rollback_needs(folder: LearnFolder) -> None:
    for number in range(1, 9):
        state = "rolled back" if number == 3 else "rejected"
        add(folder, number, number - 1, state=state)
    add(folder, 9, 5)
    set_current(folder, 9, "test")
    assert prune_versions(folder, kept=2) == [1, 4, 6, 7]  # Kept: 8, 9; 9's parent 5; 3 and 2.
    assert len(list_versions(folder)) == 9


def test_a_candidate_of_another_parent_is_not_promoted(folder: LearnFolder) -> None:
    add(folder, 1, 0)
    set_current(folder, 1, "test")
    add(folder, 2, 1, state="candidate")
    rollback(folder)
    assert promote_candidates(folder) is None
    assert read_current(folder).number == 0 and read_version(folder, 2).state == "rejected"
    add(folder, 3, 0, state="candidate")
    promoted = promote_candidates(folder)
    assert promoted is not None and read_current(folder).number == 3
    assert read_version(folder, 3) == promoted


def test_a_rollback_is_not_overwritten_by_a_promotion(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback during a promotion waits for it, and then reverts it."""
    add(folder, 1, 0)
    set_current(folder, 1, "test")
    add(folder, 2, 1, state="candidate")
    threads = []

    def roll_back_meanwhile(*args: object) -> CurrentVersion:
        threads.append(threading.Thread(target=rollback, args=(folder, 0)))
        threads[0].start()
        threads[0].join(0.2)
        return write_current(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(promotion, "write_current", roll_back_meanwhile)
    promote_candidates(folder)
    threads[0].join()
    assert read_current(folder).number == 0
    assert [record.state for record in list_versions(folder)] == ["rolled back", "rolled back"]


def test_versions_of_another_drafter_are_refused(folder: LearnFolder) -> None:
    check_base(folder, "other")
    add(folder, 1, 0)
    check_base(folder, "base")
    with pytest.raises(UserError, match="trained from another drafter"):
        check_base(folder, "other")

"""EngineLoad: what a trainer reads of engines that run, hang or have ended."""

import shutil
import time
from pathlib import Path

import pytest

from peagle.learn import engine_load
from peagle.learn.engine_load import LAYOUT, EngineLoad, EngineLoadWriter
from peagle.learn.folder import LearnFolder


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is not stale because the machine is busy."""
    monkeypatch.setattr(engine_load, "STALE_SECONDS", 600.0)


def test_the_load_of_engines(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path)
    assert EngineLoad.read_all(folder) == []
    writers = [EngineLoadWriter(folder, f"replica-{i}") for i in range(2)]
    assert not any(load.busy for load in EngineLoad.read_all(folder))
    writers[1].write(3, 2, last_step=12.5)
    first, second = EngineLoad.read_all(folder)
    assert not first.busy and second.busy
    assert (second.engine, second.running, second.waiting) == ("replica-1", 3, 2)
    assert second.last_step == 12.5 and 0 <= time.monotonic() - second.written < 60
    writers[1].close()
    assert not any(load.busy for load in EngineLoad.read_all(folder))


def test_servers_with_engines_of_the_same_name(tmp_path: Path) -> None:
    """As during a rolling update: each writes its own file, and a name is used again."""
    folder = LearnFolder(tmp_path)
    first, second = (EngineLoadWriter(folder, "engine") for _ in range(2))
    first.write(1, 0, 0.0)
    second.write(2, 0, 0.0)
    assert sorted(load.running for load in EngineLoad.read_all(folder)) == [1, 2]
    first.close()
    third = EngineLoadWriter(folder, "engine")
    third.write(3, 0, 0.0)
    assert sorted(load.running for load in EngineLoad.read_all(folder)) == [2, 3]


def test_a_lost_disk_does_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    writer = EngineLoadWriter(LearnFolder(tmp_path), "engine")
    shutil.rmtree(tmp_path)
    writer.write(1, 0, 0.0)
    monkeypatch.setattr("os.pwrite", fail)
    writer.write(1, 0, 0.0)
    writer.close()


def test_an_engine_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stays; neither it nor one of an earlier boot makes the machine busy."""
    folder = LearnFolder(tmp_path)
    EngineLoadWriter(folder, "engine").write(1, 0, 0.0)
    (load,) = EngineLoad.read_all(folder)
    assert load.busy
    monkeypatch.setattr(engine_load, "STALE_SECONDS", 0.0)
    assert not load.busy
    monkeypatch.undo()
    later = LAYOUT.pack(1, 0, 0.0, time.monotonic() + 1000)
    (folder.load / "engine.bin").write_bytes(later)
    (folder.load / "short.bin").write_bytes(b"123")
    (load,) = EngineLoad.read_all(folder)
    assert not load.busy

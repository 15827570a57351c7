"""EngineLoad: the load of running, stale and ended engines, as a trainer reads it."""

import shutil
import time
from pathlib import Path

import pytest

from peagle.learn import engine_load
from peagle.learn.engine_load import LAYOUT, EngineLoad, EngineLoadWriter
from peagle.learn.folder import LearnFolder


@pytest.fixture(autouse=True)
def no_stale_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a long time limit, so that a busy machine does not make a load stale."""
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


def test_engines_of_the_same_name_have_separate_files(tmp_path: Path) -> None:
    """Two servers run at the same time during a rolling update, and file names are reused."""
    folder = LearnFolder(tmp_path)
    first, second = (EngineLoadWriter(folder, "engine") for _ in range(2))
    first.write(1, 0, 0.0)
    second.write(2, 0, 0.0)
    assert sorted(load.running for load in EngineLoad.read_all(folder)) == [1, 2]
    first.close()
    third = EngineLoadWriter(folder, "engine")
    third.write(3, 0, 0.0)
    assert sorted(load.running for load in EngineLoad.read_all(folder)) == [2, 3]


def test_write_errors_do_not_reach_the_engine(
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


def test_the_load_of_an_ended_engine_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a killed engine or of an earlier boot remain, but do not count as load."""
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

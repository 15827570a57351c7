"""When processes that compile kernels are started, and that they end with their parent process.

The compilation itself is tested in test_compile_ahead.py.
"""

import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from peagle.kernels import compile_processes, compile_server, compiler_hash, sources_digest
from peagle.kernels.compile_processes import (
    PROCESSES_VARIABLE,
    SERVER_MODULE,
    CompileProcesses,
    start_compile_processes,
)
from peagle.kernels.triton.launch.compiled_marker import CompiledMarker

pytest.importorskip("triton")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Requested numbers of processes, on a machine with 16 cores and an empty cache."""
    counts: list[int] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(PROCESSES_VARIABLE, raising=False)
    monkeypatch.setattr(compile_processes, "_started", None)
    monkeypatch.setattr(compile_processes, "usable_cores", lambda: 16)
    monkeypatch.setattr(compile_processes, "CompileProcesses", counts.append)
    return counts


def test_an_empty_cache_starts_processes(started: list[int]) -> None:
    start_compile_processes()
    assert started == [16]


def test_a_cache_with_the_kernels_of_an_engine_starts_none(started: list[int]) -> None:
    CompiledMarker("an engine").write()
    start_compile_processes()
    assert started == []


def test_kernels_of_other_sources_do_not_count(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case after an upgrade."""
    CompiledMarker("an engine").write()
    sources_digest.marker_prefix.cache_clear()
    monkeypatch.setattr(sources_digest, "version", lambda package: "99.0")
    start_compile_processes()
    sources_digest.marker_prefix.cache_clear()
    assert started == [16]


def test_two_cores_start_none(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "usable_cores", lambda: 2)
    start_compile_processes()
    assert started == []


def test_a_replica_that_is_not_the_first_starts_none(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    start_compile_processes()
    assert started == []


@pytest.mark.slow
def test_the_working_directory_is_not_searched_for_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "peagle").mkdir()
    (tmp_path / "peagle" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    processes = CompileProcesses(1)
    connection = processes._starting.get()
    assert connection.recv() is True  # An EOFError would mean that the process has ended.
    connection.close()


@pytest.mark.parametrize(("jobs", "limits"), [(0, [900.0]), (2, [900.0, 60.0, 60.0])])
def test_processes_wait_longer_for_the_first_job(
    monkeypatch: pytest.MonkeyPatch, jobs: int, limits: list[float]
) -> None:
    """The weights are downloaded and loaded before the first job."""
    ours, theirs = Pipe()
    for _ in range(jobs):
        ours.send("no job")
    waited: list[float] = []

    def poll(self: Connection, timeout: float = 0.0) -> bool:
        waited.append(timeout)
        return len(waited) <= jobs

    monkeypatch.setattr(Connection, "poll", poll)
    compile_server.serve(theirs)
    assert waited == limits
    assert [ours.recv() for _ in range(jobs + 1)] == [True] + [False] * jobs


@pytest.mark.slow
def test_processes_end_with_their_parent() -> None:
    ours, theirs = Pipe()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", SERVER_MODULE, str(descriptor)]
    process = subprocess.Popen(command, pass_fds=[descriptor])
    theirs.close()
    assert ours.recv() is True  # Ready.
    assert process.poll() is None
    ours.close()  # The end of the parent closes this connection.
    assert process.wait(60) == 0


def test_the_hash_of_the_compiler_is_cached() -> None:
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    compiler_hash.hash_compiler()
    assert triton_key.cache_info().misses == 1
    triton_key()
    assert triton_key.cache_info().hits == 1

"""Where processes that compile kernels are started, and that they end with the process they serve.

What they compile is tested in test_compile_ahead.py.
"""

import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from peagle.kernels import compile_processes, compiler_hash
from peagle.kernels.compile_processes import SERVER_MODULE, start_compile_processes
from peagle.kernels.triton.launch.compiled_marker import CompiledMarker

pytest.importorskip("triton")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers of processes that would be started, with 16 cores and an empty cache."""
    counts: list[int] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_processes, "_started", None)
    monkeypatch.setattr(compile_processes, "available_cores", lambda: 16)
    monkeypatch.setattr(compile_processes, "CompileProcesses", counts.append)
    return counts


def test_an_empty_cache_starts_processes(started: list[int]) -> None:
    start_compile_processes()
    assert started == [16]


def test_a_cache_with_the_kernels_of_an_engine_starts_none(started: list[int]) -> None:
    CompiledMarker("an engine").write()
    start_compile_processes()
    assert started == []


def test_two_cores_start_none(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "available_cores", lambda: 2)
    start_compile_processes()
    assert started == []


def test_they_end_with_the_process_that_they_serve() -> None:
    ours, theirs = Pipe()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", SERVER_MODULE, str(descriptor)]
    process = subprocess.Popen(command, pass_fds=[descriptor])
    theirs.close()
    assert ours.recv() is True  # Ready.
    assert process.poll() is None
    ours.close()  # As when the process ends.
    assert process.wait(60) == 0


def test_the_hash_of_the_compiler_is_kept() -> None:
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    compiler_hash.hash_compiler()
    assert triton_key.cache_info().misses == 1
    triton_key()
    assert triton_key.cache_info().hits == 1

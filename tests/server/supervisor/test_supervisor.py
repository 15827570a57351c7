"""When a process is replaced, and how its end is described."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.server.engine_process.engine_supervisor import EngineSupervisor
from peagle.server.http_workers.metrics_files import allocate_metrics_files
from peagle.server.messages import EngineInfo, TargetInfo, WorkerBatch, WorkerStatus
from peagle.server.supervisor.process_supervisor import exit_text
from peagle.server.supervisor.socket_folder import create_socket_folder
from tests.support.server.serving import SETTINGS

TARGET = TargetInfo("tiny", "", [1], EngineInfo("p-eagle", 256, 96), ("p-eagle", 3), [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def make_supervisor(tmp_path: Path, **changes: float) -> EngineSupervisor:
    settings = replace(SETTINGS, **changes)
    return EngineSupervisor(settings, "engine", {}, tmp_path, "module", lambda: None)


def poll_every_half_second(
    supervisor: EngineSupervisor, clock: list[float], seconds: int
) -> str | None:
    """Poll the process every half second."""
    reason = None
    for _ in range(2 * seconds):
        clock[0] += 0.5
        reason = reason or supervisor.replacement_reason()
    return reason


def test_silence_counts_once_the_process_is_ready(tmp_path: Path, clock: list[float]) -> None:
    supervisor = make_supervisor(tmp_path, step_timeout=10)
    supervisor._receive(WorkerBatch(status=WorkerStatus()))
    assert poll_every_half_second(supervisor, clock, 100) is None  # The process loads.
    supervisor._receive(WorkerBatch(status=WorkerStatus(TARGET)))
    assert supervisor.state == "ready"
    assert poll_every_half_second(supervisor, clock, 9) is None
    supervisor._receive(WorkerBatch(status=WorkerStatus(TARGET)))
    assert poll_every_half_second(supervisor, clock, 9) is None
    clock[0] += 1000  # If the supervisor itself was stopped, the worker does not count as silent.
    assert supervisor.replacement_reason() is None
    assert "hangs" in str(poll_every_half_second(supervisor, clock, 2))


def test_silence_without_a_time_limit(tmp_path: Path, clock: list[float]) -> None:
    supervisor = make_supervisor(tmp_path, step_timeout=0)
    supervisor._receive(WorkerBatch(status=WorkerStatus(TARGET)))
    assert poll_every_half_second(supervisor, clock, 5000) is None


def test_counts_of_ended_processes_are_kept(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path)
    counts = {"p-eagle": {"generated_tokens": 5, "finished:stop": 1}}
    for total in (5, 10):
        supervisor._receive(WorkerBatch(status=WorkerStatus(TARGET, counts=counts)))
        assert supervisor.has_proved()
        supervisor.process_ended()
        assert supervisor.engine_state().counts["p-eagle"]["generated_tokens"] == total
    supervisor._receive(WorkerBatch(status=WorkerStatus(TARGET)))
    assert not supervisor.has_proved()


def test_exit_codes() -> None:
    assert exit_text(1) == "exit code 1"
    assert exit_text(137) == "exit code 137, SIGKILL"
    assert exit_text(255) == "exit code 255"


def test_a_socket_folder_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no-such-folder")
    with pytest.raises(UserError, match=r"\(No such file or directory\): set TMPDIR to a folder"):
        create_socket_folder()
    monkeypatch.setattr(tempfile, "tempdir", "/" + 100 * "x")
    with pytest.raises(UserError, match="set TMPDIR to a shorter path"):
        create_socket_folder()


def test_no_space_for_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "none"))
    with pytest.raises(UserError, match="free space there, or set TMPDIR"):
        allocate_metrics_files()

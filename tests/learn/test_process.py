"""The learner process: it starts jobs, reports their state, and survives killed jobs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.learn import process
from peagle.learn.events import read_events
from peagle.learn.folder import LearnFolder
from peagle.learn.process import Learner
from peagle.learn.settings import LearnerSettings
from peagle.learn.status import TrainerStatus, read_status, write_status
from tests.support.train.learning import answers, make_folder, tiny_teacher, write_documents
from tests.support.waiting import wait_for

SETTINGS = LearnerSettings("tiny", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    return make_folder(tmp_path, tiny_teacher())


def job_command(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let jobs run a script instead of the trainer."""
    original = process.ThrottledJob
    monkeypatch.setattr(
        process, "ThrottledJob", lambda command, nice: original([sys.executable, "-c", script])
    )


def run_until(learner: Learner, condition: Callable[[], bool]) -> None:
    def stop() -> None:
        wait_for(condition)
        learner.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    learner.run()
    thread.join()


def test_a_round_waits_for_enough_documents(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    learner = Learner(folder, SETTINGS, on_gpu=False)
    monkeypatch.setattr(learner, "run_job", lambda: started.append(True))
    write_documents(folder, answers()[:10], time=1000.0)
    assert not learner.is_due()
    assert 0 < read_status(folder).new_documents <= 10
    write_documents(folder, answers()[10:], time=1001.0)
    assert learner.is_due()


def test_a_killed_job_is_reported_and_restarted(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(folder, answers(), time=1000.0)
    job_command(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(process, "FIRST_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(process, "POLL_SECONDS", 0.01)

    def failures() -> int:
        return sum(event.kind == "failed" for event in read_events(folder.events))

    run_until(Learner(folder, SETTINGS, on_gpu=False), lambda: failures() >= 2)
    assert "killed by SIGKILL: it resumes" in read_events(folder.events)[0].text
    assert "SIGKILL" in str(read_status(folder).error)


def test_temporarily_invalid_settings(folder: LearnFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor may write training.json in several steps."""
    monkeypatch.setattr(process, "POLL_SECONDS", 0.01)
    started: list[bool] = []
    learner = Learner(folder, SETTINGS, on_gpu=False)
    monkeypatch.setattr(learner, "run_job", lambda: started.append(True))
    write_documents(folder, answers(), time=1000.0)
    path = folder.root / "training.json"
    settings = path.read_text()
    path.write_text("{")

    def has_recovered() -> bool:
        if "not valid JSON" in str(read_status(folder).error):
            path.write_text(settings)
        return bool(started)

    run_until(learner, has_recovered)
    assert started


def test_one_learner_at_a_time(folder: LearnFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second learner, for example in a rolling update, waits until the first has ended."""
    monkeypatch.setattr(process, "POLL_SECONDS", 0.01)
    runs: list[str] = []
    first, second = (Learner(folder, SETTINGS, on_gpu=False) for _ in range(2))
    monkeypatch.setattr(first, "is_due", lambda: runs.append("first"))
    monkeypatch.setattr(second, "is_due", lambda: runs.append("second"))
    threads = [threading.Thread(target=learner.run) for learner in (first, second)]
    threads[0].start()
    wait_for(lambda: "first" in runs)
    threads[1].start()
    time.sleep(0.1)
    assert "second" not in runs
    first.stop()
    wait_for(lambda: "second" in runs)
    second.stop()
    for thread in threads:
        thread.join()


def test_a_full_disk_does_not_end_the_learner(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    write_documents(folder, answers(), time=1000.0)
    job_command(monkeypatch, "raise SystemExit(2)")
    monkeypatch.setattr(process, "write_status", fail)
    monkeypatch.setattr(process, "append_event", fail)
    monkeypatch.setattr(process, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(process, "POLL_SECONDS", 0.01)
    learner = Learner(folder, SETTINGS, on_gpu=False)
    run_until(learner, lambda: learner.failures >= 2)


@pytest.mark.slow
def test_sigterm_lets_a_job_save_its_state(folder: LearnFolder) -> None:
    """The whole process, with a real job that is stopped in its first steps."""
    from tests.support.train.learning import learner_settings, tiny_root

    write_documents(folder, answers(), time=1000.0)
    (folder.root / "training.json").write_text(
        '{"min_documents": 20, "min_held_back": 5, "pack_tokens": 256, "epochs": 500, "nice": 0}'
    )
    settings = learner_settings(tiny_root()).to_json()
    command = [sys.executable, "-m", "peagle.learn.process", str(folder.root), settings]
    write_status(folder, TrainerStatus())
    learner = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        wait_for(lambda: read_status(folder).step >= 2)
        job = read_status(folder).pid
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(60) == 0
    finally:
        learner.kill()
    assert not Path(f"/proc/{job}").exists()
    assert list((folder.root / "round" / "state").glob("step-*.pt"))
    status = read_status(folder)
    assert status.state == "waiting" and status.pid == 0

"""The throttle: a job uses no CPU time while requests run, and never outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.learn.engine_load import EngineLoadWriter
from peagle.learn.folder import LearnFolder
from peagle.learn.training.pacer import Pacer, is_busy
from peagle.learn.training.throttle import IDLE_SECONDS, Throttle, ThrottledJob, run_throttled
from tests.support.waiting import wait_for

SPIN = [sys.executable, "-c", "while True: pass"]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def ignores_signal(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_job_runs_while_engines_are_idle_and_for_a_share_of_busy_time() -> None:
    throttle = Throttle(0.25)
    assert throttle.allows(False, 10.9)
    assert throttle.allows(True, 11.2)  # 0.2 s of this second have passed
    assert not throttle.allows(True, 11.3)
    assert not throttle.allows(False, 11.4)  # idle for too short a time
    assert throttle.allows(False, 11.3 + IDLE_SECONDS)
    assert not Throttle(0.0).allows(True, 12.0)


def test_a_stopped_job_uses_no_cpu_time(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path)
    load = EngineLoadWriter(folder, "engine")
    job = ThrottledJob(SPIN, nice=0)
    log: list[tuple[bool, int]] = []
    stopped_ticks: list[int] = []

    def stopping() -> bool:
        """The engine is idle, then busy after 20 ticks of CPU time, then idle again."""
        ticks = cpu_ticks(job.pid)
        if log and not log[-1][0]:
            stopped_ticks.append(ticks)
        if not log:
            load.write(int(ticks >= 20), 0, 0.0)
        elif not log[-1][0]:
            busy = time.monotonic() < stopped_at[0] + 0.5
            load.write(int(busy), 0, 0.0)
        return len(log) > 1 and ticks > log[-1][1] + 5

    stopped_at: list[float] = []

    def changed(running: bool) -> None:
        if not running:  # The signal may arrive a little later.
            wait_for(lambda: process_state(job.pid) == "T")
        stopped_at.append(time.monotonic())
        log.append((running, cpu_ticks(job.pid)))

    run_throttled(job, Throttle(0.0), lambda: is_busy(folder), stopping, changed)
    assert [running for running, _ in log[:2]] == [False, True]
    assert stopped_ticks[-1] - log[0][1] <= 1  # no CPU time while stopped for half a second
    assert job.exit_code() == -signal.SIGTERM


def test_a_job_that_ignores_sigterm_is_killed_even_if_stopped() -> None:
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN)"
    job = ThrottledJob([sys.executable, "-c", f"{ignore}\nwhile True: time.sleep(1)"], nice=0)
    wait_for(lambda: ignores_signal(job.pid, signal.SIGTERM))
    job.set_running(False)
    wait_for(lambda: process_state(job.pid) == "T")
    assert job.end(timeout=0.1) == -signal.SIGKILL


def test_workers_of_a_job_are_killed_after_it(tmp_path: Path) -> None:
    """SIGTERM is sent to the job only; SIGKILL ends the remaining processes of its group."""
    out = tmp_path / "worker"
    script = f"""
import pathlib, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
out = pathlib.Path({str(out)!r})
def end(*_):
    time.sleep(0.2)
    out.write_text(f"{{worker.pid}} {{worker.poll()}}")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
out.touch()
while True: time.sleep(1)
"""
    job = ThrottledJob([sys.executable, "-c", script], nice=0)
    wait_for(out.exists)
    assert job.end() == 3
    pid, state = out.read_text().split()
    assert state == "None"
    wait_for(lambda: process_state(int(pid)) in ("gone", "Z"))


def test_a_job_has_the_lowest_priority() -> None:
    job = ThrottledJob(SPIN)
    assert os.getpriority(os.PRIO_PROCESS, job.pid) == 19
    if sys.platform.startswith("linux"):  # If memory runs out, the kernel kills the job first.
        assert Path(f"/proc/{job.pid}/oom_score_adj").read_text() == "1000\n"
    job.end()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_killed_learner_leaves_no_stopped_job() -> None:
    script = (
        "import sys, time; from peagle.learn.training.throttle import ThrottledJob\n"
        "job = ThrottledJob([sys.executable, '-c', 'while True: pass'])\n"
        "job.set_running(False); print(job.pid, flush=True); time.sleep(60)"
    )
    learner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert learner.stdout is not None
    pid = int(learner.stdout.readline())
    wait_for(lambda: process_state(pid) == "T")
    learner.kill()
    learner.wait()
    wait_for(lambda: process_state(pid) in ("gone", "Z"))


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_pacer_keeps_the_share_while_requests_run(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path)
    load = EngineLoadWriter(folder, "engine")
    fake = FakeTime()
    pacer = Pacer(folder, 0.1, fake.clock, fake.sleep)
    load.write(1, 0, 0.0)
    for seconds in (60.0, 30.0, 0.02):  # compiling, and the first step of compiled code
        fake.now += seconds
        pacer.pause()
    assert fake.now == pytest.approx(90.02)
    fake.now = 100.02
    pacer.started = 100.0
    pacer.pause()
    assert fake.now == pytest.approx(100.2)
    fake.now += 10.0  # another shape is compiled, which counts as 0.1 s only
    pacer.pause()
    assert fake.now == pytest.approx(100.2 + 10.0 + 0.9)
    load.write(0, 0, 0.0)
    fake.now = 200.0
    pacer.pause()
    assert fake.now == pytest.approx(200.0)

"""Throttle: stops a job while requests run, with SIGSTOP, and continues it when engines are idle.

A stopped process uses no CPU time at once, whatever it computes. With a share of time, the job
runs for that fraction of each period even while requests run.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PERIOD_SECONDS = 1.0
IDLE_SECONDS = 0.3  # engines are idle for so long before the job continues
POLL_SECONDS = 0.01
TERMINATE_SECONDS = 30.0  # a job has this long to finish its step and save its state
LOWEST_PRIORITY = 19
COMPILE_THREADS = "2"  # torch.compile uses all cores otherwise, which slows the engines
PR_SET_PDEATHSIG = 1


class Throttle:
    """The duty cycle of a job as a function of time: `allows` says whether it may run now."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.last_busy = -IDLE_SECONDS

    def allows(self, busy: bool, now: float) -> bool:
        if busy:
            self.last_busy = now
        if now - self.last_busy >= IDLE_SECONDS:
            return True
        return now % PERIOD_SECONDS < self.share * PERIOD_SECONDS


class ThrottledJob:
    """A process group that is stopped and continued. It never outlives this process."""

    def __init__(self, command: list[str], nice: int = LOWEST_PRIORITY) -> None:
        self.parent = os.getpid()
        self.nice = nice
        # A group of its own: signals reach the job's workers too.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=self._prepare,
            env={"TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS, **os.environ},
        )
        self.stopped = False

    def _prepare(self) -> None:
        """Runs in the new process: a low priority, and killed by the kernel with its parent.

        SIGKILL ends a stopped process too. Without memory, the kernel kills the job first, and not
        the engine, which may be larger.
        """
        os.nice(self.nice)
        with contextlib.suppress(OSError):  # Linux only.
            Path("/proc/self/oom_score_adj").write_text("1000")
        with contextlib.suppress(OSError, AttributeError):  # Linux only.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.parent:
            os._exit(1)

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """None: it runs."""
        return self.process.poll()

    def set_running(self, running: bool) -> None:
        if running == self.stopped:
            self._signal(signal.SIGCONT if running else signal.SIGSTOP)
            self.stopped = not running

    def end(self, timeout: float = TERMINATE_SECONDS) -> int:
        """Let it finish its step and save its state, then end it; returns the exit code."""
        self.set_running(True)
        if self.exit_code() is None:
            self.process.terminate()  # Not its workers, which it needs for its last step.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self._signal(signal.SIGKILL)  # also its workers, if any are left
        return self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def run_throttled(
    job: ThrottledJob,
    throttle: Throttle,
    is_busy: Callable[[], bool],
    is_stopping: Callable[[], bool],
    on_change: Callable[[bool], None] = lambda running: None,
) -> int:
    """Run the job to its end, or until `is_stopping`; returns its exit code.

    `on_change` is told when the job is stopped or continued.
    """
    try:
        while job.exit_code() is None and not is_stopping():
            allowed = throttle.allows(is_busy(), time.monotonic())
            if allowed == job.stopped:
                job.set_running(allowed)
                on_change(allowed)
            time.sleep(POLL_SECONDS)
    finally:
        code = job.end()
    return code

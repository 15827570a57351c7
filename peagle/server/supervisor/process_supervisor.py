"""ProcessSupervisor: runs a process, and starts it again when it ends or must be replaced.

    starting -> ready <-> unwell -> down -> starting ...      closed

Engine processes, front processes and vLLM are supervised by subclasses, which know when their
process is ready and when it no longer answers.
"""

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

from peagle.errors import UserError
from peagle.server.http.logs import log_event
from peagle.server.supervisor.backoff import Backoff
from peagle.server.supervisor.child_process import ChildProcess
from peagle.server.supervisor.launch_spec import LaunchSpec

ProcessState = Literal["starting", "ready", "unwell", "down", "closed"]
MAX_FIRST_STARTS = 3  # attempts to start a process that has never been ready
USAGE_ERROR = 2  # exit code of a mistake in the settings, which another attempt would repeat
POLL_SECONDS = 0.02


class ProcessSupervisor:
    # Processes in a row that end before they have proved themselves; None: no limit.
    max_failures: int | None = None

    def __init__(self, name: str, backoff: float) -> None:
        """`backoff` is the number of seconds before the first restart; it doubles each time."""
        self.name = name
        self.state: ProcessState = "starting"
        self.restarts = 0
        self.process: ChildProcess | None = None
        self.was_ready = False
        self.ready_at = 0.0  # Time of the current process, by the monotonic clock; 0.0: not yet.
        self.failures = 0
        self._finishing = False
        self._backoff = Backoff(backoff)

    # --- what a subclass decides ------------------------------------------------------------------

    async def prepare(self) -> None:
        """Called once, before the first process."""

    def launch_spec(self) -> LaunchSpec:
        """Return how the next process is started."""
        raise NotImplementedError

    def start_process(self) -> ChildProcess:
        return ChildProcess(self.launch_spec())

    async def monitor(self) -> None:
        """Watch a process until this is canceled."""

    def replacement_reason(self) -> str | None:
        """Return why the process must be replaced although it runs; None: it need not be."""
        return None

    def has_proved(self) -> bool:
        """Return whether the process did something useful: its end is no failed attempt then."""
        return bool(self.ready_at)

    def failure(self) -> str | None:
        """Return why no process can ever succeed, if that is known."""
        return None

    def process_ended(self) -> None:
        """Called as soon as a process has ended, or must be replaced."""

    async def close(self) -> None:
        """Called in the end."""

    # --- the life of the processes ----------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def mark_ready(self) -> None:
        if not self.ready_at:
            self.ready_at = time.monotonic()
        self.state = "ready"
        self.was_ready = True
        log_event("worker ready", worker=self.name, pid=self.pid, restarts=self.restarts)

    async def run(self) -> None:
        """Run processes until this is canceled. UserError: there is no point in another one."""
        try:
            await self.prepare()
            for attempt in itertools.count(1):
                process = await self._run_process()
                if self._finishing:
                    return
                self._check_can_continue(process, attempt)
                lifetime = time.monotonic() - self.ready_at if self.ready_at else 0.0
                wait = self._backoff.next(lifetime)
                log_event(
                    "worker ended",
                    logging.WARNING,
                    worker=self.name,
                    code=process.exit_code,
                    next_try_in=wait,
                )
                await asyncio.sleep(wait)
                if self._finishing:
                    return
                self.restarts += 1
        finally:
            self.state = "closed"
            await self.close()

    def finish(self) -> None:
        """Send SIGTERM. `run` returns when the process has ended."""
        self._finishing = True
        if self.process is not None:
            self.process.terminate()

    async def _run_process(self) -> ChildProcess:
        """Run one process until it ends or must be replaced."""
        self.state = "starting"
        self.ready_at = 0.0
        process = self.process = self.start_process()
        monitor = asyncio.create_task(self.monitor())
        reason = None
        try:
            while process.is_running and reason is None:
                await asyncio.sleep(POLL_SECONDS)
                reason = self.replacement_reason()
            await asyncio.sleep(POLL_SECONDS)  # What it has sent last is read meanwhile.
        finally:
            self.state = "down"
            monitor.cancel()
            self.process_ended()
            if reason is not None:
                log_event("worker replaced", logging.ERROR, worker=self.name, reason=reason)
            await process.stop(graceful=reason is None)
        return process

    def _check_can_continue(self, process: ChildProcess, attempt: int) -> None:
        reason = self.failure()
        if reason is not None:
            raise UserError(reason)
        code = process.exit_code
        if not self.was_ready and (code == USAGE_ERROR or attempt >= MAX_FIRST_STARTS):
            raise UserError(describe_failure(process, "cannot be started"))
        self.failures = 0 if self.has_proved() else self.failures + 1
        if self.max_failures is not None and self.failures >= self.max_failures:
            raise UserError(describe_failure(process, f"failed {self.failures} times in a row"))

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "restarts": self.restarts,
            "pid": self.pid,
        }


def describe_failure(process: ChildProcess, what: str) -> str:
    lines = "\n".join(f"  {line}" for line in process.log_tail)
    return f"{process.name} {what} ({exit_text(process.exit_code)}). The end of its log:\n{lines}"


def exit_text(code: int) -> str:
    """Return "exit code 1", or with the signal's name for 128 + its number."""
    with suppress(ValueError):
        if code > 128:
            return f"exit code {code}, {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def start_task(
    work: Coroutine[Any, Any, None], on_failure: Callable[[str], None]
) -> "asyncio.Task[None]":
    """Run a supervisor, or what starts some; `on_failure` is called if that can never succeed."""

    def report(task: "asyncio.Task[None]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        known = isinstance(error, UserError | OSError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        log_event("failed", logging.ERROR, None if known else error, reason=reason)
        on_failure(reason)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(report)
    return task

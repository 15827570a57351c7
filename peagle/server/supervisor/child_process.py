"""ChildProcess: its output goes into the log, and nothing of it outlives `stop`."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from peagle.server.http.logs import log_event, log_worker_line
from peagle.server.supervisor.launch_spec import LaunchSpec

PROCESS_GUARD = Path(__file__).with_name("process_guard.py")
POLL_SECONDS = 0.05
STOP_TIMEOUT_SECONDS = 8.0  # for a graceful stop
KILL_TIMEOUT_SECONDS = 15.0  # for a killed process to be gone
LOG_DRAIN_SECONDS = 1.0  # for the last lines of the output
LOG_TAIL_LINES = 15  # lines of the output that an error message shows


class ChildProcess:
    def __init__(self, spec: LaunchSpec) -> None:
        self.name = spec.name
        self._log_tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._lost_lines = 0  # lines since the last one that could be written
        guard = (sys.executable, "-I", "-S", str(PROCESS_GUARD), str(spec.socket))
        self._process = subprocess.Popen(
            [*guard, *spec.command],
            env=dict(spec.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=spec.inherited_files,
        )
        self.pid = self._process.pid
        log_event("worker started", worker=self.name, pid=self.pid)
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that has ended."""
        return self._process.returncode

    @property
    def log_tail(self) -> list[str]:
        """The last lines of the output; of JSON lines, their message."""
        lines = list(self._log_tail)  # The reader may append to it meanwhile.
        return [log_message(line) for line in lines]

    async def stop(self, graceful: bool = True) -> None:
        """Stop by SIGTERM; else close the guard's input; in the end kill the process group."""
        assert self._process.stdin is not None
        if graceful:
            self.terminate()
        if not graceful or not await self._wait(STOP_TIMEOUT_SECONDS):
            log_event("worker killed", logging.WARNING, worker=self.name)
            self._process.stdin.close()
            await self._wait(KILL_TIMEOUT_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._wait(KILL_TIMEOUT_SECONDS)
        self._process.stdin.close()
        await asyncio.to_thread(self._log_reader.join, LOG_DRAIN_SECONDS)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def _wait(self, timeout_seconds: float) -> bool:
        """Wait for the process to end; return whether it has."""
        deadline = time.monotonic() + timeout_seconds
        while self.is_running and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return not self.is_running

    def _read_log(self) -> None:
        """Write the output of the process into the server's log. This runs on a thread."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for raw in lines:
                if line := raw.decode(errors="replace").rstrip():
                    self._log_tail.append(line)
                    self._log_line(line)

    def _log_line(self, line: str) -> None:
        """Log one line. Where that fails, reading goes on: a worker blocks on a full pipe."""
        try:
            log_worker_line(line, self.name)
        except (OSError, ValueError):  # the disk is full, or stderr is closed
            self._lost_lines += 1
            return
        if self._lost_lines:
            log_event("log lines lost", logging.WARNING, worker=self.name, lines=self._lost_lines)
            self._lost_lines = 0


def log_message(line: str) -> str:
    """Return the reason or the event of a JSON log line; other lines are returned unchanged."""
    try:
        event = json.loads(line)
        return str(event.get("reason") or event["event"])
    except (ValueError, KeyError, AttributeError, RecursionError):
        return line

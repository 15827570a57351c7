"""A worker: a server in a process of its own, behind a Unix socket; started, watched, started again when it ends.

starting -> ready <-> unwell (it says 503 of itself) -> down -> starting ...      closed
"""

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from peagle.errors import UserError
from peagle.server.backoff import Backoff
from peagle.server.http.logs import log_event, pass_on

State = Literal["starting", "ready", "unwell", "down", "closed"]
LEASH = Path(__file__).with_name("process_guard.py")
TRIES = 3  # of a first start
REFUSED = 2  # the exit code of a mistake that another try repeats
GLANCE, LOOK = 0.05, 0.5  # seconds between looks: at the process; at its health
SILENCE = 60.0  # seconds without any word from a process that is there
RESTART = 1200.0  # seconds until one that has been ready before is ready again
STOP, KILL = 8.0, 15.0  # seconds to stop in good order; to be gone when killed
KEYS = ("PEAGLE_API_KEY", "SM_VLLM_API_KEY", "VLLM_API_KEY")
LINES = 15  # of its log, told when it cannot start


@dataclass(frozen=True, slots=True)
class Launch:
    """How a worker is started."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    socket: Path
    patience: (
        float  # seconds it may say 503 of itself, once it was ready, before it is started again
    )


def inherited() -> dict[str, str]:
    """The environment of a worker: ours, without keys. They are asked for by us alone."""
    return {name: value for name, value in os.environ.items() if name not in KEYS}


class Worker:
    def __init__(self, launch: Launch, backoff: float) -> None:
        self.launch, self.backoff = launch, backoff
        self.name = launch.name
        self.state: State = "starting"
        self.restarts = self.in_flight = self.context = 0
        self.pid: int | None = None
        self.proven = False  # it has been ready once
        self._started = self._ready_at = self._heard = self._unwell_since = 0.0
        self._last: deque[str] = deque(maxlen=LINES)
        self._reader: threading.Thread
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=2
        )
        transport = httpx.AsyncHTTPTransport(uds=str(launch.socket), limits=limits)
        timeout = httpx.Timeout(None, connect=5)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://worker", timeout=timeout
        )

    async def run(self) -> None:
        """Until it is canceled. UserError: it never was ready, and will not be."""
        backoff = Backoff(self.backoff)
        try:
            for tries in itertools.count(1):
                code = await self._life()
                if not self.proven and (code == REFUSED or tries == TRIES):
                    raise UserError(self._obituary(code))
                wait = backoff.next(time.monotonic() - self._ready_at if self._ready_at else 0.0)
                log_event(
                    "worker ended", logging.WARNING, worker=self.name, code=code, next_try_in=wait
                )
                await asyncio.sleep(wait)
                self.restarts += 1
        finally:
            self.state = "closed"
            await self.client.aclose()

    async def get(self, path: str, seconds: float = 5.0) -> httpx.Response:
        return await self.client.get(path, timeout=seconds)

    async def well(self) -> bool:
        """Asked now, by whoever got no answer; where it is not, nobody else is sent there."""
        try:
            found = (await self.get("/health")).status_code == 200
        except httpx.TimeoutException:
            return True  # slow is not dead: silence is measured elsewhere
        except httpx.HTTPError:
            found = False
        if not found:
            self._found_unwell()
        return found

    def about(self) -> dict[str, Any]:
        told = {
            "state": self.state,
            "restarts": self.restarts,
            "in_flight": self.in_flight,
            "pid": self.pid,
        }
        return {"name": self.name} | told

    async def _life(self) -> int:
        """One process from its start to its end; its exit code."""
        self.state, self._ready_at = "starting", 0.0
        self._heard = self._started = time.monotonic()
        self._last.clear()
        self.launch.socket.unlink(missing_ok=True)
        process = self._start()
        watching = asyncio.create_task(self._watch())
        try:
            while process.poll() is None and not self._lost():
                await asyncio.sleep(GLANCE)
        finally:
            self.state = "down"
            watching.cancel()
            await self._end(process)
        return process.returncode

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LEASH), str(self.launch.socket), *self.launch.command],
            env=dict(self.launch.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = process.pid
        log_event("worker started", worker=self.name, pid=process.pid)
        self._reader = threading.Thread(target=self._log, args=(process,), daemon=True)
        self._reader.start()
        return process

    async def _watch(self) -> None:
        while True:
            try:
                reply = await self.get("/health", SILENCE)
                self._heard = time.monotonic()
                if reply.status_code == 200:
                    await self._found_well()
                else:
                    self._found_unwell()
            except httpx.HTTPError:
                pass  # not there yet, or not any more
            except Exception as error:
                log_event("worker not understood", logging.WARNING, error, worker=self.name)
            await asyncio.sleep(LOOK)

    async def _found_well(self) -> None:
        if self.state == "ready":
            return
        if not self._ready_at:
            models = (await self.get("/v1/models")).json()
            self.context = int(models["data"][0].get("max_model_len") or 0)
            self._ready_at = time.monotonic()
        self.state, self.proven = "ready", True
        log_event("worker ready", worker=self.name, context=self.context, restarts=self.restarts)

    def _found_unwell(self) -> None:
        if self.state == "ready":
            self.state, self._unwell_since = "unwell", time.monotonic()
            log_event("worker unwell", logging.WARNING, worker=self.name)

    def _lost(self) -> bool:
        """It is there, but will not answer any more. A first start may take as long as it takes: it fetches, say."""
        now = time.monotonic()
        if not self._ready_at:
            return self.proven and now - self._started > RESTART
        unwell = self.state == "unwell" and now - self._unwell_since > self.launch.patience
        return unwell or now - self._heard > SILENCE

    async def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """In good order; else by letting the leash go; else the whole group."""
        assert process.stdin is not None
        with suppress(ProcessLookupError):
            process.terminate()
        if not await gone(process, STOP):
            log_event("worker killed", logging.WARNING, worker=self.name)
            process.stdin.close()
            await gone(process, KILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await gone(process, KILL)
        process.stdin.close()
        await asyncio.to_thread(self._reader.join, 1)  # its last lines

    def _log(self, process: "subprocess.Popen[bytes]") -> None:
        """Its lines become ours. On a thread."""
        assert process.stdout is not None
        with process.stdout as lines:
            for raw in lines:
                if line := raw.decode(errors="replace").rstrip():
                    self._last.append(line)
                    pass_on(line, self.name)

    def _obituary(self, code: int) -> str:
        lines = "\n".join(f"  {said(line)}" for line in self._last)
        return f"{self.name} cannot be started (exit code {code}). The end of its log:\n{lines}"


def said(line: str) -> str:
    """A JSON line's own words."""
    try:
        told = json.loads(line)
        return str(told.get("reason") or told["event"])
    except (ValueError, KeyError, AttributeError):
        return line


async def gone(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(GLANCE)
    return process.poll() is not None

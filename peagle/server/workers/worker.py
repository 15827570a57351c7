"""A worker: a server in its own process behind a Unix socket, which is monitored and restarted.

starting -> ready <-> unwell (its health check fails) -> down -> starting ...      closed
"""

import asyncio
import itertools
import logging
import time
from typing import Any, Literal

import httpx

from peagle.errors import UserError
from peagle.server.backoff import Backoff
from peagle.server.http.logs import log_event
from peagle.server.workers.launch_spec import LaunchSpec
from peagle.server.workers.worker_process import POLL_SECONDS, WorkerProcess

WorkerState = Literal["starting", "ready", "unwell", "down", "closed"]
MAX_FIRST_STARTS = 3  # attempts to start a worker that has never been ready
USAGE_ERROR = 2  # exit code of a mistake in the settings, which another attempt would repeat
HEALTH_CHECK_SECONDS = 0.5  # between two health checks
SILENCE_TIMEOUT_SECONDS = 60.0  # without an answer from a process that is running
REQUEST_TIMEOUT_SECONDS = 5.0
CONNECT_TIMEOUT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 2.0
MAX_IDLE_CONNECTIONS = 64


class Worker:
    def __init__(self, spec: LaunchSpec, backoff: float) -> None:
        """`backoff` is the number of seconds before the first restart; it doubles each time."""
        self.spec = spec
        self.name = spec.name
        self.state: WorkerState = "starting"
        self.restarts = 0
        self.in_flight = 0  # requests that were sent to it and are not finished
        self.context = 0  # maximum number of tokens of a request; 0 until it is known
        self.pid: int | None = None
        self.was_ready = False
        self.client = create_client(spec)
        self._backoff = Backoff(backoff)
        # Times of the current process, by the monotonic clock; 0.0: not yet.
        self._started_at = 0.0
        self._ready_at = 0.0
        self._last_response_at = 0.0
        self._unhealthy_since = 0.0

    async def run(self) -> None:
        """Run processes until this is canceled. UserError: the worker cannot be started."""
        try:
            for attempt in itertools.count(1):
                process = await self._run_process()
                code = process.exit_code
                if not self.was_ready and (code == USAGE_ERROR or attempt == MAX_FIRST_STARTS):
                    raise UserError(describe_failure(process))
                lifetime = time.monotonic() - self._ready_at if self._ready_at else 0.0
                wait = self._backoff.next(lifetime)
                log_event(
                    "worker ended", logging.WARNING, worker=self.name, code=code, next_try_in=wait
                )
                await asyncio.sleep(wait)
                self.restarts += 1
        finally:
            self.state = "closed"
            await self.client.aclose()

    async def get(
        self, path: str, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS
    ) -> httpx.Response:
        return await self.client.get(path, timeout=timeout_seconds)

    async def is_healthy(self) -> bool:
        """Check the health now, after a failed request; an unhealthy worker gets no requests."""
        try:
            healthy = (await self.get("/health")).status_code == 200
        except httpx.TimeoutException:
            return True  # slow, but alive: silence has a limit of its own
        except httpx.HTTPError:
            healthy = False
        if not healthy:
            self._mark_unhealthy()
        return healthy

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "restarts": self.restarts,
            "in_flight": self.in_flight,
            "pid": self.pid,
        }

    async def _run_process(self) -> WorkerProcess:
        """Run one process until it ends or must be replaced."""
        self.state = "starting"
        self._ready_at = 0.0
        self._started_at = time.monotonic()
        self._last_response_at = self._started_at
        self.spec.socket.unlink(missing_ok=True)
        process = WorkerProcess(self.spec)
        self.pid = process.pid
        monitor = asyncio.create_task(self._monitor())
        try:
            while process.is_running and not self._is_unresponsive():
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self.state = "down"
            monitor.cancel()
            await process.stop()
        return process

    async def _monitor(self) -> None:
        """Check the health of the process at regular intervals."""
        while True:
            try:
                response = await self.get("/health", SILENCE_TIMEOUT_SECONDS)
                self._last_response_at = time.monotonic()
                if response.status_code == 200:
                    await self._mark_ready()
                else:
                    self._mark_unhealthy()
            except httpx.HTTPError:
                pass  # the process does not listen yet, or not any more
            except Exception as error:
                log_event("worker health check failed", logging.WARNING, error, worker=self.name)
            await asyncio.sleep(HEALTH_CHECK_SECONDS)

    async def _mark_ready(self) -> None:
        if self.state == "ready":
            return
        if not self._ready_at:
            models = (await self.get("/v1/models")).json()
            self.context = int(models["data"][0].get("max_model_len") or 0)
            self._ready_at = time.monotonic()
        self.state = "ready"
        self.was_ready = True
        log_event("worker ready", worker=self.name, context=self.context, restarts=self.restarts)

    def _mark_unhealthy(self) -> None:
        if self.state == "ready":
            self.state = "unwell"
            self._unhealthy_since = time.monotonic()
            log_event("worker unwell", logging.WARNING, worker=self.name)

    def _is_unresponsive(self) -> bool:
        """Return whether the process runs but must be replaced.

        The first start has no time limit: it may download a model.
        """
        now = time.monotonic()
        if not self._ready_at:
            return self.was_ready and now - self._started_at > self.spec.restart_timeout
        is_unhealthy = self.state == "unwell"
        if is_unhealthy and now - self._unhealthy_since > self.spec.unhealthy_timeout:
            return True
        return now - self._last_response_at > SILENCE_TIMEOUT_SECONDS


def create_client(spec: LaunchSpec) -> httpx.AsyncClient:
    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=MAX_IDLE_CONNECTIONS,
        keepalive_expiry=KEEP_ALIVE_SECONDS,
    )
    transport = httpx.AsyncHTTPTransport(uds=str(spec.socket), limits=limits)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS)
    return httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=timeout)


def describe_failure(process: WorkerProcess) -> str:
    lines = "\n".join(f"  {line}" for line in process.log_tail)
    return (
        f"{process.name} cannot be started (exit code {process.exit_code})."
        f" The end of its log:\n{lines}"
    )

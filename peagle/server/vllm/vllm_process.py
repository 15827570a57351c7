"""VllmProcess: vLLM's API server in a process behind a Unix socket, watched by its /health."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.supervisor.detached import run_detached
from peagle.server.supervisor.launch_spec import LaunchSpec
from peagle.server.supervisor.process_supervisor import ProcessSupervisor
from peagle.server.vllm.vllm_launch import VllmLaunch

HEALTH_CHECK_SECONDS = 0.5  # between two health checks
SILENCE_TIMEOUT_SECONDS = 60.0  # without an answer from a process that is running
REQUEST_TIMEOUT_SECONDS = 5.0
CONNECT_TIMEOUT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 2.0
MAX_IDLE_CONNECTIONS = 64


class VllmProcess(ProcessSupervisor):
    # Seconds that vLLM may report itself unhealthy, once it was ready: its engine is dead then.
    unhealthy_timeout = 3.0
    # Seconds that a restarted vLLM may take to become ready, before it is started once more.
    restart_timeout = 1200.0

    def __init__(self, prepare: Callable[[Path], VllmLaunch], folder: Path, backoff: float) -> None:
        """`prepare` gets the path of vLLM's socket, in `folder`; it may be slow."""
        super().__init__("vllm", backoff)
        self.socket = folder / "vllm.sock"
        self.launch: VllmLaunch | None = None  # None: it is being prepared.
        self.context = 0  # maximum number of tokens of a request; 0 until it is known
        self.client = create_client(self.socket)
        self._prepare = prepare
        # Times of the current process, by the monotonic clock; 0.0: not yet.
        self._started_at = 0.0
        self._last_response_at = 0.0
        self._unhealthy_since = 0.0

    @property
    def unavailable_reason(self) -> str:
        if self.was_ready:
            return "the engine stopped and is being started again"
        return "the model is still loading"

    def require_ready(self) -> VllmLaunch:
        if self.state != "ready" or self.launch is None:
            raise ApiError(503, f"{self.unavailable_reason}: try again later", retry_after=2)
        return self.launch

    async def prepare(self) -> None:
        """On a thread, which may download a target, and does not keep the server from exiting."""
        self.launch = await run_detached(lambda: self._prepare(self.socket))

    def launch_spec(self) -> LaunchSpec:
        assert self.launch is not None
        self._started_at = time.monotonic()
        self._last_response_at = self._started_at
        self.socket.unlink(missing_ok=True)
        return LaunchSpec(self.name, self.launch.command, self.launch.environment, self.socket)

    async def close(self) -> None:
        await self.client.aclose()

    async def get(
        self, path: str, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS
    ) -> httpx.Response:
        return await self.client.get(path, timeout=timeout_seconds)

    async def metrics(self) -> str:
        """Return vLLM's /metrics; "" if there is no answer."""
        try:
            response = await self.get("/metrics") if self.state == "ready" else None
        except httpx.HTTPError:
            return ""
        return response.text if response is not None and response.status_code == 200 else ""

    async def is_healthy(self) -> bool:
        """Check the health now, after a failed request; an unhealthy vLLM gets no requests."""
        try:
            healthy = (await self.get("/health")).status_code == 200
        except httpx.TimeoutException:
            return True  # slow, but alive: silence has a limit of its own
        except httpx.HTTPError:
            healthy = False
        if not healthy:
            self._mark_unhealthy()
        return healthy

    async def monitor(self) -> None:
        """Check the health of the process at regular intervals."""
        while True:
            try:
                response = await self.get("/health", SILENCE_TIMEOUT_SECONDS)
                self._last_response_at = time.monotonic()
                if response.status_code == 200:
                    await self._mark_healthy()
                else:
                    self._mark_unhealthy()
            except httpx.HTTPError:
                pass  # the process does not listen yet, or not any more
            except Exception as error:
                log_event("worker health check failed", logging.WARNING, error, worker=self.name)
            await asyncio.sleep(HEALTH_CHECK_SECONDS)

    async def _mark_healthy(self) -> None:
        if self.state == "ready":
            return
        if not self.ready_at:
            models = (await self.get("/v1/models")).json()
            self.context = int(models["data"][0].get("max_model_len") or 0)
        self.mark_ready()

    def _mark_unhealthy(self) -> None:
        if self.state == "ready":
            self.state = "unwell"
            self._unhealthy_since = time.monotonic()
            log_event("worker unwell", logging.WARNING, worker=self.name)

    def replacement_reason(self) -> str | None:
        """The first start has no time limit: it may download a model."""
        now = time.monotonic()
        if not self.ready_at:
            late = self.was_ready and now - self._started_at > self.restart_timeout
            return "it did not become ready in time" if late else None
        if self.state == "unwell" and now - self._unhealthy_since > self.unhealthy_timeout:
            return "it is unhealthy"
        silent = now - self._last_response_at > SILENCE_TIMEOUT_SECONDS
        return "it does not answer" if silent else None


def create_client(socket: Path) -> httpx.AsyncClient:
    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=MAX_IDLE_CONNECTIONS,
        keepalive_expiry=KEEP_ALIVE_SECONDS,
    )
    transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS)
    return httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=timeout)

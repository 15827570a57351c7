"""The backend over workers: it checks requests and relays them; health and limits are its own."""

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
from fastapi import Request, Response

from peagle.errors import UserError
from peagle.server.http.backend import RouteHandler, check_model_name
from peagle.server.http.cache_salt import with_salt
from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event, request_log_fields
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.settings import ServerSettings
from peagle.server.workers.launch_spec import LaunchSpec
from peagle.server.workers.relay import Relay
from peagle.server.workers.worker import Worker
from peagle.server.workers.worker_metrics import render_metrics
from peagle.server.workers.worker_set import WorkerSet

T = TypeVar("T")
RELAYED_PATHS = {
    "chat": "/v1/chat/completions",
    "complete": "/v1/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
SALTED_PATHS = ("/v1/chat/completions", "/v1/completions")
# Length of the path of the temporary folder. With the rest of the path, a Unix socket's stays
# below 103 bytes, the limit on every system.
MAX_TMPDIR_BYTES = 72


class WorkerKind(Protocol):
    """What the workers are: servers of this package (replicas.py), or vLLM (vllm_worker.py)."""

    status_path: str

    def launch_specs(self, folder: Path) -> Sequence[LaunchSpec]:
        """Return what to start; `folder` is for the sockets.

        This runs on a thread: it may be slow, for example when it downloads a target.
        """

    def prepare_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body that a worker gets. ApiError: the request cannot be honored."""

    def status(self, responses: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        """Return methods, method, k and engines, from the responses to `status_path`."""


class Gateway:
    def __init__(self, settings: ServerSettings, kind: WorkerKind) -> None:
        self.settings = settings
        self.kind = kind
        self.drain = Drain(settings.drain_seconds)
        self.model_name = settings.model_names[0]
        self.response_counts = ResponseCounts(self.model_name)
        self.workers = WorkerSet()
        self._relay = Relay(self.workers, self.drain, settings.timeout)
        self._socket_folder = create_socket_folder()
        self._start_task: asyncio.Task[None] | None = None

    @property
    def route_handlers(self) -> Mapping[str, RouteHandler]:
        return {name: self._relay_handler(path) for name, path in RELAYED_PATHS.items()}

    @property
    def is_healthy(self) -> bool:
        return bool(self.workers.ready) and not self.drain.is_draining

    @property
    def unavailable_reason(self) -> str:
        return self.workers.unavailable_reason

    @property
    def context(self) -> int:
        return self.workers.context

    async def start(self, on_failure: Callable[[str], None]) -> None:
        self._start_task = asyncio.create_task(self._start_workers(on_failure))

    async def close(self) -> None:
        if self._start_task is not None:
            self._start_task.cancel()
        await self.workers.close()
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    async def status(self) -> dict[str, Any]:
        responses = await self.workers.get_all(self.kind.status_path)
        return {
            "model": self.model_name,
            "state": self.workers.state,
            "restarts": self.workers.restarts,
            **self.kind.status(responses),
            "workers": self.workers.status(),
        }

    async def metrics(self) -> bytes:
        responses = await self.workers.get_all("/metrics")
        texts = {worker: response.text for worker, response in responses.items()}
        return await asyncio.to_thread(render_metrics, texts, self.workers, self.response_counts)

    def _relay_handler(self, path: str) -> RouteHandler:
        async def relay(request: Request, body: dict[str, Any]) -> Response:
            body = self._check_request(body)
            if path in SALTED_PATHS:
                body = with_salt(request.scope, body)
            if self.settings.log_prompts:
                prompt = body.get("messages") or body.get("prompt")
                request_log_fields(request.scope)["prompt"] = prompt
            return await cancel_on_disconnect(request, self._relay.send(request, path, body))

        return relay

    def _check_request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body that a worker gets. ApiError: the request is refused."""
        self.drain.check_accepting()
        check_model_name(body.get("model"), self.settings.model_names)
        body = self.kind.prepare_body(body)
        worker_count = max(1, len(self.workers.all))
        max_in_flight = self.settings.max_queue + self.settings.max_batch * worker_count
        in_flight = self.workers.in_flight
        if in_flight >= max_in_flight:
            raise ApiError(429, f"{in_flight} requests are running: try again later", retry_after=1)
        return body

    async def _start_workers(self, on_failure: Callable[[str], None]) -> None:
        try:
            specs = await run_detached(lambda: self.kind.launch_specs(self._socket_folder))
        except Exception as error:
            expected = isinstance(error, UserError | OSError)
            traceback_of = None if expected else error
            log_event("failed to start", logging.ERROR, traceback_of, reason=str(error))
            on_failure(str(error))
            return
        self.workers.start(specs, self.settings.backoff, on_failure)


def create_socket_folder() -> Path:
    """Create a temporary folder that only this user can read."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > MAX_TMPDIR_BYTES:
        raise UserError(
            f"the path of a Unix socket would be too long in {root}: set TMPDIR to a shorter path"
        )
    return Path(tempfile.mkdtemp(prefix="peagle-"))


async def run_detached(work: Callable[[], T]) -> T:
    """Run `work` on a thread that does not keep the server from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # the future was canceled meanwhile
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)

"""The front of workers: a request is checked here and passed on; health, models, status and metrics are ours."""

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

from peagle.errors import UserError
from peagle.server.http.backend import Handler, check_name
from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.settings import ServerSettings
from peagle.server.workers.relay import PATHS, relaying
from peagle.server.workers.worker import Launch, Worker
from peagle.server.workers.worker_metrics import page_of
from peagle.server.workers.worker_set import WorkerSet

T = TypeVar("T")
LONGEST = (
    72  # bytes of the path of TMPDIR; with ours behind it, a socket's may have 103 on every system
)


class Kind(Protocol):
    """What the workers are: our own server (replicas.py), or vLLM's (vllm.py)."""

    status_path: str

    def launches(self, folder: Path) -> Sequence[Launch]:
        """What to start; `folder` is for their sockets. Slow: it may fetch a target. On a thread."""

    def passed_on(self, body: dict[str, Any]) -> dict[str, Any]:
        """What of a request's body a worker gets; ApiError: it cannot be honored."""

    def status(self, replies: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        """methods, method, k and engines, from what the workers said at `status_path`."""


class Gateway:
    def __init__(self, settings: ServerSettings, kind: Kind) -> None:
        self.settings, self.kind = settings, kind
        self.drain = Drain(settings.drain_seconds)
        self.model = settings.model_names[0]
        self.replies = ResponseCounts(self.model)
        self.workers = WorkerSet()
        self._folder = socket_folder()
        self._starting: asyncio.Task[None] | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {name: relaying(self, path) for name, path in PATHS.items()}

    @property
    def healthy(self) -> bool:
        return bool(self.workers.ready) and not self.drain.begun

    @property
    def reason(self) -> str:
        return self.workers.reason

    @property
    def context(self) -> int:
        return self.workers.context

    def admit(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body as a worker gets it, if the request may come in."""
        self.drain.check()
        check_name(body.get("model"), self.settings.model_names)
        body = self.kind.passed_on(body)
        most = self.settings.max_queue + self.settings.max_batch * max(1, len(self.workers.all))
        if self.workers.in_flight >= most:
            raise ApiError(
                429,
                f"{self.workers.in_flight} requests are under way: try again later",
                retry_after=1,
            )
        return body

    async def start(self, on_failure: Callable[[str], None]) -> None:
        self._starting = asyncio.create_task(self._start(on_failure))

    async def _start(self, on_failure: Callable[[str], None]) -> None:
        try:
            launches = await apart(lambda: self.kind.launches(self._folder))
        except Exception as error:
            known = isinstance(error, UserError | OSError)
            log_event("failed to start", logging.ERROR, None if known else error, reason=str(error))
            on_failure(str(error))
            return
        self.workers.start(launches, self.settings.backoff, on_failure)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self.workers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def status(self) -> dict[str, Any]:
        replies = await self.workers.ask(self.kind.status_path)
        about = {
            "model": self.model,
            "state": self.workers.state,
            "restarts": self.workers.restarts,
        }
        return about | self.kind.status(replies) | {"workers": self.workers.about()}

    async def metrics(self) -> bytes:
        replies = await self.workers.ask("/metrics")
        pages = {worker: reply.text for worker, reply in replies.items()}
        return await asyncio.to_thread(page_of, pages, self.workers, self.replies)


def socket_folder() -> Path:
    """Readable by this user only."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > LONGEST:
        raise UserError(
            f"a Unix socket's path would be too long in {root}: set TMPDIR to a shorter one"
        )
    return Path(tempfile.mkdtemp(prefix="peagle-"))


async def apart(work: Callable[[], T]) -> T:
    """On a thread that nobody waits for when the server ends."""
    future: Future[T] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # nobody wants to know any more
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)

"""Graceful shutdown: new requests are refused, running ones may finish within a time limit.

serving -> begin() -> draining: /health and new requests get 503
        -> all requests are finished, or the time limit or cut_short() aborts the rest -> stop()
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from peagle.server.http.errors import ApiError

REFUSAL = "the server is shutting down: send the request to another server"
ABORT = "the server shut down before the answer was complete"
SECOND_SIGNAL = "stops at once"  # what the log says when draining starts
FLUSH_SECONDS = 2.0  # for the error messages of aborted requests to be sent
POLL_SECONDS = 0.02


class Abortable(Protocol):
    def abort(self, error: ApiError) -> None: ...


class Drain:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_draining = False
        self.open_requests = 0  # requests whose response is not complete
        self.in_flight: set[Abortable] = set()
        self.on_begin: Callable[[], None] = lambda: None  # Called when draining starts.
        # Aborts requests that no engine has accepted yet.
        self.abort_pending: Callable[[ApiError], None] = lambda error: None
        self._is_cut_short = False
        self._task: asyncio.Task[None] | None = None

    def check_accepting(self) -> None:
        if self.is_draining:
            raise ApiError(503, REFUSAL, retry_after=1)

    @contextmanager
    def count_open(self, counts: bool) -> Iterator[None]:
        """Count a request as open; with `counts` False, the drain does not wait for it."""
        self.open_requests += counts
        try:
            yield
        finally:
            self.open_requests -= counts

    def begin(self, stop: Callable[[], None]) -> None:
        """Start draining; `stop` is called at its end. Call this from the event loop."""
        if not self.is_draining:
            self.is_draining = True
            self.on_begin()
            self._task = asyncio.get_running_loop().create_task(self._run(stop))

    def cut_short(self) -> None:
        """Abort all requests now. This may be called from a signal handler."""
        self._is_cut_short = True

    async def _run(self, stop: Callable[[], None]) -> None:
        await self._wait_until_idle(self.seconds)
        for request in list(self.in_flight):
            request.abort(ApiError(503, ABORT))
        self.abort_pending(ApiError(503, ABORT))
        await self._wait_until_idle(FLUSH_SECONDS)
        stop()

    async def _wait_until_idle(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.open_requests and not self._is_cut_short and loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)

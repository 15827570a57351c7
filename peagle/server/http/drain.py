"""Going down in good order: no new requests, those under way finish, up to a limit; then they are told.

serving -> begin() -> draining: health 503, new requests 503 -> finished, or time is up: aborted -> stop
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from peagle.server.http.errors import ApiError

GOING = "the server is shutting down: ask another one"
LAST = 2.0  # seconds for the last error messages to leave


class Abortable(Protocol):
    def abort(self, error: ApiError) -> None: ...


class Drain:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_draining = False
        self.open_requests = 0  # requests that somebody waits for
        self.in_flight: set[Abortable] = set()
        self._task: asyncio.Task[None] | None = None

    def check_accepting(self) -> None:
        if self.is_draining:
            raise ApiError(503, GOING, retry_after=1)

    @contextmanager
    def count_open(self, counts: bool) -> Iterator[None]:
        self.open_requests += counts
        try:
            yield
        finally:
            self.open_requests -= counts

    def begin(self, stop: Callable[[], None]) -> None:
        """From the event loop; `stop` is called when nobody waits any more."""
        if not self.is_draining:
            self.is_draining = True
            self._task = asyncio.get_running_loop().create_task(self._run(stop))

    async def _run(self, stop: Callable[[], None]) -> None:
        await self._empty(self.seconds)
        for answer in list(self.in_flight):
            answer.abort(ApiError(503, "the server shut down before the answer was complete"))
        await self._empty(LAST)
        stop()

    async def _empty(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while self.open_requests and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

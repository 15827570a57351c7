"""A request passed through to a worker, and its answer back: bytes as they come, whole events only.

Nothing sent yet when the worker is lost: another one gets the request, once. A stream under way is told, and ends.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from fastapi import Request, Response

from peagle.server.http.backend import Handler
from peagle.server.http.errors import ApiError
from peagle.server.http.limits import LARGE
from peagle.server.http.logs import request_id, request_notes
from peagle.server.http.sse import DONE, EventStream, unless_gone
from peagle.server.workers.worker import Worker

if TYPE_CHECKING:
    from peagle.server.workers.gateway import Gateway

T = TypeVar("T")
STOPPED = "the engine stopped while it answered: try again"
ABORTED = b'"finish_reason":"abort"'  # so vLLM ends answers, as if all were well, when an engine of it goes down
PATHS = {
    "chat": "/v1/chat/completions",
    "complete": "/v1/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}


class Lost(Exception):
    """The worker is gone, and nothing of its answer was sent."""


class Aborted(Lost):
    """It is going, and its health says so seconds later."""


def relaying(gateway: "Gateway", path: str) -> Handler:
    async def relay(request: Request, body: dict[str, Any]) -> Response:
        body = gateway.admit(body)
        if gateway.settings.log_prompts:
            request_notes(request.scope)["prompt"] = body.get("messages") or body.get("prompt")
        return await unless_gone(request, passed(request, gateway, path, body))

    return relay


async def passed(request: Request, gateway: "Gateway", path: str, body: dict[str, Any]) -> Response:
    passage = Passage(gateway, path, await written(body, request), request.scope)
    try:
        await passage.open()
        if passage.body is None:
            return EventStream(passage.events(), passage.close, gateway.settings.timeout)
    except BaseException:
        await passage.close()
        raise
    await passage.close()
    return passage.whole()


async def written(body: dict[str, Any], request: Request) -> bytes:
    """What was checked is what is sent: where a key came twice, the worker sees what we saw."""
    large = int(request.headers.get("content-length", LARGE)) >= LARGE
    return await asyncio.to_thread(dumped, body) if large else dumped(body)


def dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


class Passage:
    def __init__(self, gateway: "Gateway", path: str, content: bytes, scope: Any) -> None:
        self.gateway, self.path, self.content, self.scope = gateway, path, content, scope
        self.began = time.monotonic()
        seconds = gateway.settings.timeout
        self.deadline = asyncio.get_running_loop().time() + seconds if seconds else None
        self.body: bytes | None = None  # of an answer that is no stream
        self._worker: Worker | None = None
        self._reply: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._first = b""
        self._rest = b""  # the beginning of an event
        self._error: ApiError | None = None
        self._limit: asyncio.Timeout | None = None
        gateway.drain.answers.add(self)

    async def open(self) -> None:
        """Until there is something to send."""
        lost: list[Worker] = []
        for last in (False, True):
            self._worker = worker = self.gateway.workers.pick(lost)
            worker.in_flight += 1
            request_notes(self.scope)["worker"] = worker.name
            try:
                await self._timed(self._ask(worker))
                request_notes(self.scope)["ttft"] = round(time.monotonic() - self.began, 4)
                return
            except (Lost, httpx.TransportError) as error:
                await self._leave()
                request_notes(self.scope)["asked_again"] = True
                if isinstance(error, Aborted) or not await worker.well():
                    lost.append(worker)
                if last:
                    raise ApiError(503, STOPPED, retry_after=2) from error

    async def _ask(self, worker: Worker) -> None:
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-request-id": request_id(self.scope),
        }
        self.body, self._rest = None, b""
        asked = worker.client.build_request(
            "POST", self.path, content=self.content, headers=headers
        )
        self._reply = reply = await worker.client.send(asked, stream=True)
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            self._chunks = reply.aiter_raw()
            self._first = await self._next() or b""
            failed = not self._first or self._first.startswith(b'data: {"error"')
        else:
            self.body = await reply.aread()
            failed = reply.status_code >= 500
        if ABORTED in (self._first if self.body is None else self.body):
            raise Aborted
        if failed and not await worker.well():
            raise Lost

    def whole(self) -> Response:
        assert self._reply is not None
        kept = ("content-type", "retry-after")
        headers = {name: self._reply.headers[name] for name in kept if name in self._reply.headers}
        return Response(self.body, self._reply.status_code, headers)

    async def events(self) -> AsyncIterator[bytes]:
        data: bytes | None = self._first
        ended = False
        while data:
            if ABORTED in data:
                raise ApiError(503, STOPPED)
            ended = data.endswith(DONE)
            yield data
            try:
                data = await self._timed(self._next())
            except httpx.TransportError as error:
                raise ApiError(503, STOPPED) from error
        if not ended:
            raise ApiError(503, STOPPED)

    async def _next(self) -> bytes | None:
        """One or more whole events; None when there are no more."""
        assert self._chunks is not None
        async for chunk in self._chunks:
            data = self._rest + chunk
            cut = data.rfind(b"\n\n") + 2
            if cut > 1:
                self._rest = data[cut:]
                return data[:cut]
            self._rest = data
        return None

    def abort(self, error: ApiError) -> None:
        """Whoever reads is told."""
        self._error, self.deadline = error, asyncio.get_running_loop().time()
        if self._limit is not None:
            with suppress(RuntimeError):  # nobody waits just now
                self._limit.reschedule(self.deadline)

    async def _timed(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self.deadline) as self._limit:
                return await work
        except TimeoutError as error:
            seconds = self.gateway.settings.timeout
            late = ApiError(
                504, f"the answer was not complete after {seconds:g} seconds: ask for less"
            )
            raise self._error or late from error

    async def close(self) -> None:
        """The end, whatever it was: a worker whose connection is closed stops answering."""
        self.gateway.drain.answers.discard(self)
        await self._leave()

    async def _leave(self) -> None:
        worker, reply = self._worker, self._reply
        self._worker = self._chunks = None
        if worker is not None:
            worker.in_flight -= 1
        if reply is not None:
            await reply.aclose()

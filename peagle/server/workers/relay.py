"""Relaying a request to a worker and its answer back: bytes as they arrive, whole events only.

If a worker is lost before anything was sent to the client, another worker gets the request, once.
A stream that has begun ends with an error event.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from fastapi import Request, Response
from starlette.types import Scope

from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError
from peagle.server.http.limits import THREAD_PARSE_BYTES
from peagle.server.http.logs import request_id, request_log_fields
from peagle.server.http.sse import DONE_EVENT, EventStream
from peagle.server.workers.worker import Worker
from peagle.server.workers.worker_set import WorkerSet

T = TypeVar("T")
ENGINE_STOPPED = "the engine stopped while it answered: try again"
# vLLM ends its answers like this, with status 200, when one of its engines goes down.
ABORT_MARK = b'"finish_reason":"abort"'
ERROR_EVENT_START = b'data: {"error"'
RELAYED_HEADERS = ("content-type", "retry-after")


class WorkerLost(Exception):
    """The worker is gone, and nothing of its answer was sent to the client."""


class WorkerAborted(WorkerLost):
    """The worker is going down; its health check fails only seconds later."""


class Relay:
    def __init__(self, workers: WorkerSet, drain: Drain, timeout: float) -> None:
        """`timeout` is the number of seconds an answer may take; 0 means no limit."""
        self.workers = workers
        self.drain = drain
        self.timeout = timeout

    async def send(self, request: Request, path: str, body: dict[str, Any]) -> Response:
        """Send a request to a worker and return the response for the client."""
        content = await encode_body(body, request)
        relayed = RelayedRequest(self, path, content, request.scope)
        try:
            await relayed.open()
            if relayed.body is None:
                return EventStream(relayed.events(), relayed.close, self.timeout)
        except BaseException:
            await relayed.close()
            raise
        await relayed.close()
        return relayed.response()


async def encode_body(body: dict[str, Any], request: Request) -> bytes:
    """Encode the checked body.

    The client's bytes are not reused: where they repeat a key, the worker could read another value
    than the one that was checked.
    """
    length = int(request.headers.get("content-length", THREAD_PARSE_BYTES))
    if length >= THREAD_PARSE_BYTES:
        return await asyncio.to_thread(encode_json, body)
    return encode_json(body)


def encode_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


class RelayedRequest:
    """One request of a client, on one worker after another."""

    def __init__(self, relay: Relay, path: str, content: bytes, scope: Scope) -> None:
        self.body: bytes | None = None  # of an answer that is not a stream
        self._relay = relay
        self._path = path
        self._content = content
        self._scope = scope
        self._started_at = time.monotonic()
        now = asyncio.get_running_loop().time()
        self._deadline = now + relay.timeout if relay.timeout else None
        self._worker: Worker | None = None
        self._worker_response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._first_events = b""
        self._partial_event = b""
        self._abort_error: ApiError | None = None
        self._timer: asyncio.Timeout | None = None
        relay.drain.in_flight.add(self)

    async def open(self) -> None:
        """Send the request and wait for a whole body, or for the first events of a stream."""
        lost: list[Worker] = []
        fields = request_log_fields(self._scope)
        for is_last_attempt in (False, True):
            worker = self._relay.workers.pick(lost)
            self._worker = worker
            worker.in_flight += 1
            fields["worker"] = worker.name
            try:
                await self._with_deadline(self._send(worker))
                fields["ttft"] = round(time.monotonic() - self._started_at, 4)
                return
            except (WorkerLost, httpx.TransportError) as error:
                await self._release_worker()
                fields["asked_again"] = True
                if isinstance(error, WorkerAborted) or not await worker.is_healthy():
                    lost.append(worker)
                if is_last_attempt:
                    raise ApiError(503, ENGINE_STOPPED, retry_after=2) from error

    def response(self) -> Response:
        """Return the response for the client, of an answer that is not a stream."""
        assert self._worker_response is not None
        received = self._worker_response.headers
        headers = {name: received[name] for name in RELAYED_HEADERS if name in received}
        return Response(self.body, self._worker_response.status_code, headers)

    async def events(self) -> AsyncIterator[bytes]:
        data: bytes | None = self._first_events
        is_complete = False
        while data:
            if ABORT_MARK in data:
                raise ApiError(503, ENGINE_STOPPED)
            is_complete = data.endswith(DONE_EVENT)
            yield data
            try:
                data = await self._with_deadline(self._next_events())
            except httpx.TransportError as error:
                raise ApiError(503, ENGINE_STOPPED) from error
        if not is_complete:
            raise ApiError(503, ENGINE_STOPPED)

    def abort(self, error: ApiError) -> None:
        """End the request with this error; its client gets it."""
        self._abort_error = error
        self._deadline = asyncio.get_running_loop().time()
        if self._timer is not None:
            with suppress(RuntimeError):  # nothing waits for the worker at the moment
                self._timer.reschedule(self._deadline)

    async def close(self) -> None:
        """Release the worker; a worker stops answering when its connection is closed."""
        self._relay.drain.in_flight.discard(self)
        await self._release_worker()

    async def _send(self, worker: Worker) -> None:
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-request-id": request_id(self._scope),
        }
        self.body = None
        self._partial_event = b""
        request = worker.client.build_request(
            "POST", self._path, content=self._content, headers=headers
        )
        response = await worker.client.send(request, stream=True)
        self._worker_response = response
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            self._chunks = response.aiter_raw()
            received = self._first_events = await self._next_events() or b""
            failed = not received or received.startswith(ERROR_EVENT_START)
        else:
            received = self.body = await response.aread()
            failed = response.status_code >= 500
        if ABORT_MARK in received:
            raise WorkerAborted
        if failed and not await worker.is_healthy():
            raise WorkerLost

    async def _next_events(self) -> bytes | None:
        """Return one or more whole events; None at the end of the stream."""
        assert self._chunks is not None
        async for chunk in self._chunks:
            data = self._partial_event + chunk
            end = data.rfind(b"\n\n") + 2
            if end > 1:
                self._partial_event = data[end:]
                return data[:end]
            self._partial_event = data
        return None

    async def _with_deadline(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline) as self._timer:
                return await work
        except TimeoutError as error:
            if self._abort_error is not None:
                raise self._abort_error from error
            raise ApiError(
                504,
                f"the answer was not complete after {self._relay.timeout:g} seconds: ask for less",
            ) from error

    async def _release_worker(self) -> None:
        worker = self._worker
        response = self._worker_response
        self._worker = None
        self._chunks = None
        if worker is not None:
            worker.in_flight -= 1
        if response is not None:
            await response.aclose()

"""Relaying a request to vLLM and its answer back: bytes as they arrive, whole events only.

If vLLM stops before anything was sent to the client, it gets a 503; a stream that has begun ends
with an error event.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from fastapi import Request, Response
from starlette.types import Scope

from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError, engine_stopped, is_anthropic
from peagle.server.http.limits import body_bytes, run_for_size
from peagle.server.http.logs import request_id, request_log_fields
from peagle.server.http.sse import DONE_EVENT, EventStream, encode_error, encode_typed_event
from peagle.server.vllm.vllm_process import VllmProcess

T = TypeVar("T")
# vLLM ends its answers like this, with status 200, when one of its engines goes down.
ABORT_MARK = b'"finish_reason":"abort"'
ERROR_EVENT_START = b'data: {"error"'
# The last event of a complete stream begins like this, or is DONE_EVENT.
LAST_EVENTS = (
    b"event: message_stop\n",
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
    b"event: error\n",
)
RELAYED_HEADERS = ("content-type", "retry-after")


class Relay:
    def __init__(self, process: VllmProcess, drain: Drain, timeout: float) -> None:
        """`timeout` is the number of seconds an answer may take; 0 means no limit."""
        self.process = process
        self.drain = drain
        self.timeout = timeout

    async def send(self, request: Request, path: str, body: dict[str, Any]) -> Response:
        """Send a request to vLLM and return the response for the client."""
        content = await run_for_size(body_bytes(request), lambda: encode_json(body))
        relayed = RelayedRequest(self, path, content, request.scope)
        try:
            await relayed.open()
            if relayed.body is None:
                return EventStream(
                    relayed.events(), relayed.close, self.timeout, stream_errors(path)
                )
        except BaseException:
            await relayed.close()
            raise
        await relayed.close()
        return relayed.response()


def encode_json(body: dict[str, Any]) -> bytes:
    """Encode the checked body.

    The client's bytes are not reused: where they repeat a key, vLLM could read another value than
    the one that was checked.
    """
    return json.dumps(body, ensure_ascii=False).encode()


def stream_errors(path: str) -> Callable[[ApiError], bytes]:
    """How a stream of this path reports that it fails."""
    if is_anthropic(path):
        return lambda error: encode_typed_event(error.anthropic_body)
    if path != "/v1/responses":
        return encode_error
    return lambda error: encode_typed_event(
        {"type": "error", "code": "server_error", "message": error.message, "param": None}
    )


def ends_stream(data: bytes) -> bool:
    """Whether these events are the last ones of a complete stream."""
    last = data.removesuffix(b"\n\n").rpartition(b"\n\n")[2] + b"\n\n"
    return last == DONE_EVENT or last.startswith(LAST_EVENTS)


class RelayedRequest:
    """One request of a client, and vLLM's answer."""

    def __init__(self, relay: Relay, path: str, content: bytes, scope: Scope) -> None:
        self.body: bytes | None = None  # of an answer that is not a stream
        self._relay = relay
        self._path = path
        self._content = content
        self._scope = scope
        self._started_at = time.monotonic()
        now = asyncio.get_running_loop().time()
        self._deadline = now + relay.timeout if relay.timeout else None
        self._vllm_response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._first_events = b""
        self._partial_event = b""
        self._abort_error: ApiError | None = None
        self._timer: asyncio.Timeout | None = None
        relay.drain.in_flight.add(self)

    async def open(self) -> None:
        """Send the request and wait for a whole body, or for the first events of a stream."""
        process = self._relay.process
        fields = request_log_fields(self._scope)
        fields["worker"] = process.name
        try:
            has_failed = await self._with_deadline(self._send())
        except httpx.TransportError as error:
            await process.is_healthy()  # If it is not, no more requests are sent to it.
            raise engine_stopped() from error
        if has_failed:
            raise engine_stopped()
        fields["ttft"] = round(time.monotonic() - self._started_at, 4)

    def response(self) -> Response:
        """Return the response for the client, of an answer that is not a stream."""
        assert self._vllm_response is not None
        received = self._vllm_response.headers
        headers = {name: received[name] for name in RELAYED_HEADERS if name in received}
        return Response(self.body, self._vllm_response.status_code, headers)

    async def events(self) -> AsyncIterator[bytes]:
        data: bytes | None = self._first_events
        is_complete = False
        while data:
            if ABORT_MARK in data:
                raise engine_stopped()
            is_complete = ends_stream(data)
            yield data
            try:
                data = await self._with_deadline(self._next_events())
            except httpx.TransportError as error:
                raise engine_stopped() from error
        if not is_complete:
            raise engine_stopped()

    def abort(self, error: ApiError) -> None:
        """End the request with this error; its client gets it."""
        self._abort_error = error
        self._deadline = asyncio.get_running_loop().time()
        if self._timer is not None:
            with suppress(RuntimeError):  # nothing waits for vLLM at the moment
                self._timer.reschedule(self._deadline)

    async def close(self) -> None:
        """Close the connection, which ends the request in vLLM."""
        self._relay.drain.in_flight.discard(self)
        self._chunks = None
        if self._vllm_response is not None:
            await self._vllm_response.aclose()

    async def _send(self) -> bool:
        """Returns whether vLLM stopped before its answer; else it answers, also with errors."""
        client = self._relay.process.client
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-request-id": request_id(self._scope),
        }
        request = client.build_request("POST", self._path, content=self._content, headers=headers)
        response = self._vllm_response = await client.send(request, stream=True)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            self._chunks = response.aiter_raw()
            received = self._first_events = await self._next_events() or b""
            failed = not received or received.startswith(ERROR_EVENT_START)
        else:
            received = self.body = await response.aread()
            failed = response.status_code >= 500
        # The health check of a vLLM that aborts its answers fails only seconds later.
        return ABORT_MARK in received or (failed and not await self._relay.process.is_healthy())

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

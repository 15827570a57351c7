"""Server-sent events, and clients that disconnect: their requests are canceled at once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from peagle.server.http.errors import INTERNAL_ERROR, ApiError
from peagle.server.http.logs import log_event, request_id, request_log_fields

T = TypeVar("T")
DONE_EVENT = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# Seconds beyond the time limit of an answer that a client may take to read it.
READ_GRACE_SECONDS = 5.0
encode_json = msgspec.json.Encoder().encode


def encode_event(data: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def encode_typed_event(data: dict[str, Any]) -> bytes:
    """An event whose name is its type, as in the Responses API and in Anthropic's."""
    return b"event: " + data["type"].encode() + b"\n" + encode_event(data)


def encode_error(error: ApiError) -> bytes:
    """The end of a stream of chunks that fails."""
    return encode_event(error.body) + DONE_EVENT


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


class EventStream(Response):
    """Send events until they end, the client disconnects, or the time limit is reached.

    If the events raise an error, the client gets what `encode_error` makes of it. `close` is called
    in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        limit: float,
        encode_error: Callable[[ApiError], bytes] = encode_error,
        ends_with_done: bool = False,
    ) -> None:
        """`limit` is the time limit of the answer in seconds; 0 means no limit.

        `ends_with_done`: nothing follows DONE_EVENT, which is sent together with the end.
        """
        super().__init__(headers=STREAM_HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self.events = events
        self.close = close
        self.encode_error = encode_error
        self.ends_with_done = ends_with_done
        self.limit = limit + READ_GRACE_SECONDS if limit else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            done, _ = await asyncio.wait(
                {sending, disconnect}, timeout=self.limit, return_when=asyncio.FIRST_COMPLETED
            )
            if sending not in done:
                client = "left" if disconnect in done else "stalled"
                request_log_fields(scope)["client"] = client
        finally:
            for task in (sending, disconnect):
                task.cancel()
            await asyncio.gather(sending, disconnect, return_exceptions=True)
            await self.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        with suppress(OSError):  # the client disconnected between two events
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            last = await self._send_events(scope, send)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, scope: Scope, send: Send) -> bytes:
        """Send all events; return what remains to be sent: the last event, an error, or nothing."""
        last = b""
        try:
            async for data in self.events:
                if self.ends_with_done and data.endswith(DONE_EVENT):
                    last = data
                    continue
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            request_log_fields(scope)["error"] = error.message
            return self.encode_error(error)
        except OSError:
            raise
        except Exception as error:
            log_event(
                "error", logging.ERROR, error, request_id=request_id(scope), path=scope["path"]
            )
            return self.encode_error(ApiError(500, INTERNAL_ERROR))
        return last


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`.

    If the client disconnects first, cancel `work` and raise ClientDisconnected. The body of the
    request must have been read.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        disconnect.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

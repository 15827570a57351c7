"""Server-sent events, and clients that go away: whoever leaves frees what he asked for, at once."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from peagle.server.http.errors import INTERNAL, ApiError
from peagle.server.http.logs import log_event, request_id, request_log_fields

T = TypeVar("T")
DONE_EVENT = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
GRACE = 5.0  # seconds beyond an answer's own limit that a client may take to read it


def encode_event(data: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class ClientDisconnected(Exception):
    """The client is not there any more."""


class EventStream(Response):
    """Sends events until they end, the client leaves, or time is up; `close` is called in any case.

    `events` end with DONE; where they end with an ApiError, the client is told it, and DONE.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], limit: float
    ) -> None:
        super().__init__(headers=HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self.events, self.close, self.limit = events, close, limit + GRACE if limit else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, send))
        leaving = asyncio.create_task(left(receive))
        try:
            done, _ = await asyncio.wait(
                {sending, leaving}, timeout=self.limit, return_when=asyncio.FIRST_COMPLETED
            )
            if sending not in done:
                request_log_fields(scope)["client"] = "left" if leaving in done else "stalled"
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        with suppress(OSError):  # it left between two events
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            last = b""
            try:
                async for data in self.events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                request_log_fields(scope)["error"] = error.message
                last = encode_event(error.body) + DONE_EVENT
            except OSError:
                raise
            except Exception as error:
                log_event(
                    "error", logging.ERROR, error, request_id=request_id(scope), path=scope["path"]
                )
                last = encode_event(ApiError(500, INTERNAL).body) + DONE_EVENT
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Its result; canceled, and `Gone`, if the client leaves first. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

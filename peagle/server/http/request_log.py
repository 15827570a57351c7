"""RequestLog: gives each request an id and a line in the log."""

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.http.drain import ABORT, Drain
from peagle.server.http.errors import INTERNAL_ERROR, ApiError
from peagle.server.http.logs import log_event, request_id, request_log_fields
from peagle.server.http.response_counts import ResponseCounts

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # request ids accepted from clients
# Paths that monitoring polls every few seconds.
UNLOGGED_PATHS = ("/health", "/ping", "/metrics", "/v1/peagle/status")


class RequestLog:
    """The outermost middleware: gives each request an id and a log line, and turns an unhandled
    exception into a 500."""

    def __init__(self, app: ASGIApp, drain: Drain, response_counts: ResponseCounts) -> None:
        self.app = app
        self.drain = drain
        self.response_counts = response_counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["peagle.request_id"] = choose_request_id(scope)
        started = time.perf_counter()
        with self.drain.count_open(scope["method"] == "POST"):
            status = await self._respond(scope, receive, send)
        if scope["path"] not in UNLOGGED_PATHS:
            self.response_counts.add(status)
            log_event(
                "request",
                request_id=request_id(scope),
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(time.perf_counter() - started, 4),
                **request_log_fields(scope),
            )

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Run the application and return the status it sent; 0 if it sent none."""
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id(scope)
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            if not self.drain.is_draining:
                raise
            # The server ends: uvicorn has canceled what is still open, and logs what is raised.
            if not status:
                await ApiError(503, ABORT).response(scope["path"])(
                    scope, receive, send_with_headers
                )
        except Exception as error:
            log_event(
                "error", logging.ERROR, error, request_id=request_id(scope), path=scope["path"]
            )
            if not status:
                response = ApiError(500, INTERNAL_ERROR).response(scope["path"])
                await response(scope, receive, send_with_headers)
        return status


def choose_request_id(scope: Scope) -> str:
    """Return the client's X-Request-Id where it is acceptable, else a new id."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

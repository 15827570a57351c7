"""Logs: one JSON object per line, on stderr. Prompts and answers are not in them by default."""

import json
import logging
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.http.drain import Drain
from peagle.server.http.errors import INTERNAL_ERROR, ApiError
from peagle.server.http.response_counts import ResponseCounts

log = logging.getLogger("peagle.server")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # request ids accepted from clients
UNSAFE = re.compile(r"[^ -~]")  # may be unprintable
# Paths that monitoring polls every few seconds.
UNLOGGED_PATHS = ("/health", "/ping", "/metrics", "/v1/peagle/status")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return encode_line(line)


def encode_line(line: dict[str, Any]) -> str:
    """Return a JSON object on one line that is safe to print on a terminal.

    Besides what JSON requires, control characters (C1 too), line separators, invisible and
    direction marks and halves of surrogate pairs are escaped: users choose some of the text.
    """
    text = json.dumps(line, ensure_ascii=False, default=str)
    return text if text.isprintable() else UNSAFE.sub(escape_unprintable, text)


def escape_unprintable(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def set_up_logging() -> None:
    """Write the lines of the server, of uvicorn and of asyncio in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("peagle.server", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "peagle.server" else logging.WARNING)


def log_event(
    event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any
) -> None:
    log.log(level, event, extra={"fields": fields}, exc_info=error)


def log_worker_line(line: str, worker: str) -> None:
    """Log a worker's line: JSON gets the worker's name added, other text becomes an event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if isinstance(event, dict):
        # One write of the whole line: other threads write too.
        sys.stderr.write(encode_line(event | {"worker": worker}) + "\n")
    else:
        log_event("log", worker=worker, line=line)


def request_log_fields(scope: Scope) -> dict[str, Any]:
    """Return the fields of the request's log line; handlers may add to them."""
    return scope.setdefault("peagle.log_fields", {})


def request_id(scope: Scope) -> str:
    return str(scope.get("peagle.request_id", ""))


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
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

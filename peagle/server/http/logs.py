"""Logs: one JSON object a line, on stderr. No prompt and no answer is in them unless --log-prompts asks for it."""

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
from peagle.server.http.errors import INTERNAL, ApiError
from peagle.server.http.response_counts import ResponseCounts

log = logging.getLogger("peagle.server")
GIVEN = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # what a client may call its request
UNLOGGED = ("/health", "/ping", "/metrics", "/v1/peagle/status")  # asked every few seconds


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(level: int = logging.INFO) -> None:
    """Ours and uvicorn's, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    for name in ("peagle.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "peagle.server" else logging.WARNING)


def log_event(
    event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any
) -> None:
    log.log(level, event, extra={"fields": fields}, exc_info=error)


def pass_on(line: str, worker: str) -> None:
    """A worker's line: JSON gets the worker's name, anything else becomes a line of ours."""
    try:
        told = json.loads(line)
        assert isinstance(told, dict)
    except (ValueError, AssertionError):
        log_event("log", worker=worker, line=line)
    else:
        sys.stderr.write(
            json.dumps(told | {"worker": worker}, ensure_ascii=False) + "\n"
        )  # whole: threads write too


def request_log_fields(scope: Scope) -> dict[str, Any]:
    """What a handler adds to the line of its request."""
    return scope.setdefault("peagle.notes", {})


def request_id(scope: Scope) -> str:
    return str(scope.get("peagle.id", ""))


class Requests:
    """Around everything: an id for each request, a line in the log, and no exception that gets away."""

    def __init__(self, app: ASGIApp, drain: Drain, replies: ResponseCounts) -> None:
        self.app, self.drain, self.replies = app, drain, replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id = scope["peagle.id"] = given if GIVEN.fullmatch(given) else uuid.uuid4().hex
        started, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        with self.drain.count_open(scope["method"] == "POST"):
            try:
                await self.app(scope, receive, sending)
            except Exception as error:
                log_event("error", logging.ERROR, error, request_id=id, path=scope["path"])
                if not status:
                    await ApiError(500, INTERNAL).response(scope, receive, sending)
        if scope["path"] not in UNLOGGED:
            self.replies.add(status)
            seconds = round(time.perf_counter() - started, 4)
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": seconds,
            }
            log_event("request", request_id=id, **fields, **request_log_fields(scope))

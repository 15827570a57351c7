"""Logs: one JSON object per line, on stderr. Prompts and answers are not in them by default."""

import json
import logging
import re
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("peagle.server")
UNSAFE = re.compile(r"[^ -~]")  # may be unprintable


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
    event: str, level: int = logging.INFO, error: BaseException | None = None, /, **fields: Any
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


def request_log_fields(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the request's log line; handlers may add to them."""
    return scope.setdefault("peagle.log_fields", {})


def request_id(scope: MutableMapping[str, Any]) -> str:
    return str(scope.get("peagle.request_id", ""))

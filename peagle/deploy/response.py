"""Responses of an OpenAI-compatible server: server-sent events, or one object."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from peagle.errors import UserError

EVENT_PREFIX = b"data:"
END_OF_STREAM = b"[DONE]"
MAX_QUOTED_BYTES = 200  # of an invalid response, in the error message


def join_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines from parts of any size; a part may even end inside a character.

    Only a newline ends a line: JSON may contain U+2028, at which `str.splitlines` splits.
    """
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    if rest.strip():
        yield rest


def parse_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each `data:` line of server-sent events, until [DONE]."""
    for line in lines:
        text = line.strip()
        if not text.startswith(EVENT_PREFIX):
            continue
        text = text.removeprefix(EVENT_PREFIX).strip()
        if text == END_OF_STREAM:
            return
        yield parse_response(text)
    raise UserError("the stream ended before its [DONE]: the answer is incomplete")


def parse_response(text: bytes) -> dict[str, Any]:
    try:
        response = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"the response of the endpoint is not JSON: {text[:MAX_QUOTED_BYTES]!r}"
        ) from error
    if not isinstance(response, dict):
        raise UserError(
            f"the response of the endpoint is not an object: {text[:MAX_QUOTED_BYTES]!r}"
        )
    if response.get("error"):
        details = response["error"]
        message = details.get("message", details) if isinstance(details, dict) else details
        raise UserError(f"the endpoint reports: {message}")
    return response

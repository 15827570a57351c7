"""Server-sent events of a streamed chat completion."""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


async def read_events(reply: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """The JSON object of every event, until [DONE]."""
    async for line in read_lines(reply):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is an object, not {data[:50].decode(errors='replace')!r}")
        yield event


async def read_lines(reply: "httpx.Response") -> AsyncIterator[bytes]:
    """Only a newline ends a line: `aiter_lines` also splits at U+2028, which JSON may contain."""
    rest = b""
    async for part in reply.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest

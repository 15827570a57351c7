"""Server-sent events of a streamed chat completion."""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


async def read_events(reply: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """The JSON object of every event, until [DONE]."""
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is an object, not {data[:50]!r}")
        yield event

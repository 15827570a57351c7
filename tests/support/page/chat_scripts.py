"""Chunks of scripted answers for the chat view of the page (PageServer.scripts)."""

from typing import Any

USAGE = {
    "prompt_tokens": 320,
    "completion_tokens": 42,
    "total_tokens": 362,
    "prompt_tokens_details": {"cached_tokens": 256},
}


def chunk(delta: dict[str, Any], texts: list[str] | None = None, accepted: int = 0) -> Any:
    """A chunk with a delta. `texts`: the tokens of its step, some of which were drafts."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    if texts is None:
        return {"choices": [choice]}
    step = {"accepted": accepted, "drafted": 7, "tokens": len(texts), "k": 7, "texts": texts}
    return {"choices": [choice], "peagle": step}


def content(*texts: str, accepted: int = 0) -> Any:
    """A step whose tokens are shown as they are."""
    return chunk({"content": "".join(texts)}, list(texts), accepted)


def thinking(*texts: str, accepted: int = 0) -> Any:
    return chunk({"reasoning_content": "".join(texts)}, list(texts), accepted)


def call(index: int, name: str, *arguments: str) -> list[Any]:
    """The chunks of one call: its start, and its arguments in pieces."""
    start = {"index": index, "id": f"call_{name}", "type": "function", "function": {"name": name}}
    pieces = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [chunk({"tool_calls": [delta]}) for delta in [start, *pieces]]


def ending(reason: str = "stop", usage: dict[str, Any] = USAGE) -> list[Any]:
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    return [finish, {"choices": [], "usage": usage}]

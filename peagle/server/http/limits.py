"""Reading a request's body: size and time limits, UTF-8, JSON, an object, and its schema."""

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from peagle.server.http.errors import ApiError, from_validation
from peagle.server.http.schema import RequestModel, refuse_unsupported

M = TypeVar("M", bound=RequestModel)
# Bodies above this size are parsed on a thread, so that they do not block the event loop.
THREAD_PARSE_BYTES = 1 << 18
MAX_JSON_DEPTH = 64  # levels of arrays and objects


async def read_object(
    request: Request, max_bytes: int, timeout_seconds: float, any_content_type: bool = False
) -> dict[str, Any]:
    """Read the body of a request as a JSON object."""
    if not any_content_type:
        check_content_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(timeout_seconds):
            data = await read_bytes(request, max_bytes)
    except TimeoutError as error:
        message = f"the body was not complete after {timeout_seconds:g} seconds"
        raise ApiError(408, message) from error
    if len(data) > THREAD_PARSE_BYTES:
        return await asyncio.to_thread(parse_object, data)
    return parse_object(data)


def check_content_type(header: str) -> None:
    """Refuse forms and plain text.

    A web page of another origin can send those without a CORS preflight request, but not JSON.
    """
    content_type = header.partition(";")[0].strip().lower()
    is_json = content_type == "application/json" or content_type.endswith("+json")
    if content_type and not is_json:
        raise ApiError(
            415,
            f"content type {content_type!r} is not supported: send content-type: application/json",
        )


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_long(max_bytes)
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                raise too_long(max_bytes)
    except ClientDisconnect as error:
        raise ApiError(400, "the body is incomplete") from error
    return bytes(data)


def too_long(max_bytes: int) -> ApiError:
    size = f"{max_bytes / (1 << 20):g} MB"
    return ApiError(413, f"the body is longer than {size}: shorten it, or raise --max-body-mb")


def parse_object(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from error
    try:
        body = json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    check_depth(body)
    if "\\u" in text:
        check_surrogates(body)
    return body


def refuse_constant(word: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{word} is not a number in JSON")


def check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise too_deep()
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_JSON_DEPTH} levels")


def check_surrogates(body: dict[str, Any]) -> None:
    """Refuse an escaped half of a surrogate pair: it cannot be encoded as UTF-8."""
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body contains half of a surrogate pair") from error


def validate_body(model: type[M], body: dict[str, Any]) -> M:
    """Check a body against its schema."""
    refuse_unsupported(body)
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error
    check = getattr(request, "check", None)
    if check is not None:
        check()
    return request

"""Reading a request's body: size and time limits, UTF-8, JSON, an object, and its schema.

Parsing and validation hold the interpreter's lock, also on a thread. What bounds their time is the
number of values in a body, which is counted before it is parsed.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from peagle.server.http.errors import ApiError, from_validation
from peagle.server.http.schema import RequestModel, refuse_unsupported
from peagle.server.settings import ServerSettings

M = TypeVar("M", bound=RequestModel)
T = TypeVar("T")
# Bodies above this size are parsed on a thread, so that they do not block the event loop.
THREAD_PARSE_BYTES = 1 << 18
# Few threads: each of them may hold a parsed body, which is larger than its text.
BODY_THREADS = ThreadPoolExecutor(2, "peagle-body")
MAX_JSON_DEPTH = 64  # levels of arrays and objects
# Numbers, texts, arrays and objects of a body. Two million take a quarter of a second.
MAX_JSON_VALUES = 1 << 21
VALUE_MARKS = (b",", b":", b"[", b"{")  # One of them precedes every value but the first.
# Bodies of the largest size that may be received at the same time.
MAX_LARGE_BODIES = 16
MIN_BODY_BUDGET = 256 << 20  # bytes


class BodyBudget:
    """The memory of all large bodies that are being received; one beyond it is refused.

    The first THREAD_PARSE_BYTES of a body are free: large bodies must not keep small ones out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def grow(self, size: int, new_size: int) -> None:
        """Charge what a body grows by."""
        count = charged_bytes(new_size) - charged_bytes(size)
        if self.used_bytes + count > self.max_bytes:
            raise ApiError(
                503, "too many large bodies are being received: try again later", retry_after=1
            )
        self.used_bytes += count

    def release(self, size: int) -> None:
        self.used_bytes -= charged_bytes(size)


def charged_bytes(size: int) -> int:
    return max(0, size - THREAD_PARSE_BYTES)


async def run_for_size(size: int, work: Callable[[], T]) -> T:
    """Run `work` on a body of this size: here if it is small, else on a thread."""
    if size <= THREAD_PARSE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(BODY_THREADS, work)


async def read_object(
    request: Request, settings: ServerSettings, budget: BodyBudget, any_content_type: bool = False
) -> dict[str, Any]:
    """Read the body of a request as a JSON object."""
    if not any_content_type:
        check_content_type(request.headers.get("content-type", ""))
    data = bytearray()
    try:
        async with asyncio.timeout(settings.receive_seconds):
            await read_bytes(request, settings.max_body_bytes, data, budget)
        request.scope["peagle.body_bytes"] = len(data)
        return await run_for_size(len(data), lambda: parse_object(data))
    except TimeoutError as error:
        message = f"the body was not complete after {settings.receive_seconds:g} seconds"
        raise ApiError(408, message) from error
    finally:
        budget.release(len(data))


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


async def read_bytes(request: Request, max_bytes: int, data: bytearray, budget: BodyBudget) -> None:
    """Append the body to `data`, whose bytes are taken from the budget."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_long(max_bytes)
    try:
        async for chunk in request.stream():
            if len(data) + len(chunk) > max_bytes:
                raise too_long(max_bytes)
            budget.grow(len(data), len(data) + len(chunk))
            data += chunk
    except ClientDisconnect as error:
        raise ApiError(400, "the body is incomplete") from error


def too_long(max_bytes: int) -> ApiError:
    size = f"{max_bytes / (1 << 20):g} MB"
    return ApiError(413, f"the body is longer than {size}: shorten it, or raise --max-body-mb")


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    check_value_count(data)
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


def check_value_count(data: bytes | bytearray) -> None:
    """Refuse a body of too many values. Marks inside texts count too: no context is so long."""
    if len(data) > MAX_JSON_VALUES and sum(map(data.count, VALUE_MARKS)) > MAX_JSON_VALUES:
        raise ApiError(
            413,
            f"the body has more than {MAX_JSON_VALUES} commas, colons and brackets, which stand for"
            " JSON values: send several requests",
        )


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


def body_bytes(request: Request) -> int:
    """The length of a body that was read."""
    return int(request.scope.get("peagle.body_bytes", 0))


async def validate_body(request: Request, model: type[M], body: dict[str, Any]) -> M:
    """Check a body against its schema, and empty it: unknown fields are not kept in memory."""
    checked = await run_for_size(body_bytes(request), lambda: validate(model, body))
    body.clear()
    return checked


def validate(model: type[M], body: dict[str, Any]) -> M:
    """Check the body of an endpoint that has the fields of the completions API."""
    refuse_unsupported(body)
    return parse_model(model, body)


def parse_model(model: type[M], body: dict[str, Any]) -> M:
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error
    check = getattr(request, "check", None)
    if check is not None:
        check()
    return request

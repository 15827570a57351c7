"""A request's body: no longer than allowed, there in time, UTF-8, JSON, an object, and what the schema says."""

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from peagle.server.http.errors import ApiError, from_validation
from peagle.server.http.schema import RequestModel, refuse_unsupported

M = TypeVar("M", bound=RequestModel)
LARGE = 1 << 18  # bytes that would hold the others up
DEEPEST = 64  # levels of arrays and objects


async def read_object(
    request: Request, most: int, seconds: float, any_type: bool = False
) -> dict[str, Any]:
    if not any_type:
        check_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(seconds):
            data = await read_bytes(request, most)
    except TimeoutError as error:
        raise ApiError(408, f"the body was not complete after {seconds:g} seconds") from error
    return await asyncio.to_thread(parse, data) if len(data) > LARGE else parse(data)


def check_type(given: str) -> None:
    """A page of another origin cannot send JSON without asking first: forms and plain text it can."""
    kind = given.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"content type {kind!r} is not read: send content-type: application/json"
        )


async def read_bytes(request: Request, most: int) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most:
        raise too_long(most)
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                raise too_long(most)
    except ClientDisconnect as error:
        raise ApiError(400, "the body broke off") from error
    return bytes(data)


def too_long(most: int) -> ApiError:
    return ApiError(
        413, f"the body is longer than {most / (1 << 20):g} MB: shorten it, or raise --max-body-mb"
    )


def parse(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from error
    try:
        found = json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ApiError(400, f"the body is nested deeper than {DEEPEST} levels") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    check_depth(found)
    try:
        text.encode("utf-8") if "\\u" not in text else json.dumps(found, ensure_ascii=False).encode(
            "utf-8"
        )
    except UnicodeEncodeError as error:
        raise ApiError(
            400, "the body holds half of a surrogate pair, which is no character"
        ) from error
    return found


def refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number in JSON")


def check_depth(found: Any) -> None:
    level, depth = [found], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ApiError(400, f"the body is nested deeper than {DEEPEST} levels")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def validated(kind: type[M], body: dict[str, Any]) -> M:
    refuse_unsupported(body)
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error
    check = getattr(asked, "check", None)
    if check is not None:
        check()
    return asked

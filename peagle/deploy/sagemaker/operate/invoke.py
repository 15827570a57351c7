"""Requests to an endpoint, with a whole or a streamed response.

SageMaker splits a stream into parts at arbitrary bytes; the lines are joined again here.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from peagle.deploy.sagemaker.operate.clients import error_message
from peagle.errors import UserError

EVENT_PREFIX = b"data:"
END_OF_STREAM = b"[DONE]"
MAX_QUOTED_BYTES = 200  # of an invalid response, in the error message


def invoke(client: Any, name: str, request: dict[str, Any]) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        response = client.invoke_endpoint(
            EndpointName=name, ContentType="application/json", Body=json.dumps(request)
        )
        return parse_response(response["Body"].read())
    except (BotoCoreError, ClientError) as error:
        raise UserError(invocation_error(name, error)) from error


def invoke_stream(client: Any, name: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of the response.

    An error in the middle of the stream, from SageMaker or the container, is raised there.
    """
    from botocore.exceptions import BotoCoreError, ClientError, EventStreamError

    body = json.dumps(request | {"stream": True})
    try:
        response = client.invoke_endpoint_with_response_stream(
            EndpointName=name, ContentType="application/json", Accept="text/event-stream", Body=body
        )
        parts = (
            event["PayloadPart"]["Bytes"] for event in response["Body"] if "PayloadPart" in event
        )
        yield from parse_events(join_lines(parts))
    except EventStreamError as error:
        raise UserError(f"the stream of {name} broke off: {error_message(error)}") from error
    except (BotoCoreError, ClientError) as error:
        raise UserError(invocation_error(name, error)) from error


def join_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines from parts of any size; a part may even end inside a character."""
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
    if "error" in response:
        details = response["error"]
        message = details.get("message", details) if isinstance(details, dict) else details
        raise UserError(f"the container reports: {message}")
    return response


def response_text(response: dict[str, Any]) -> str:
    """The text of a whole response or of a chunk, for chat and for completions."""
    choice = (response.get("choices") or [{}])[0]
    message = choice.get("delta") or choice.get("message") or {}
    return message.get("content") or choice.get("text") or ""


def invocation_error(name: str, error: Exception) -> str:
    """The message of a failed request; an error of the container is quoted."""
    response = getattr(error, "response", {})
    if response.get("Error", {}).get("Code") == "ModelError":
        return (
            f"the container of {name} answered {response.get('OriginalStatusCode')}:"
            f" {response.get('OriginalMessage')}"
        )
    return f"{name}: {error_message(error)}"

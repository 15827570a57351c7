"""A request to an endpoint, whole or streamed. SageMaker cuts a stream into parts as it likes: lines are put together
again here."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from peagle.deploy.sagemaker.operate.clients import reason
from peagle.errors import UserError

DATA = b"data:"
END = b"[DONE]"


def whole(client: Any, name: str, request: dict[str, Any]) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = client.invoke_endpoint(
            EndpointName=name, ContentType="application/json", Body=json.dumps(request)
        )
        return read(answer["Body"].read())
    except (BotoCoreError, ClientError) as error:
        raise UserError(refused(name, error)) from error


def streamed(client: Any, name: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of the answer. An error in mid-stream, SageMaker's or the container's, is raised where it comes."""
    from botocore.exceptions import BotoCoreError, ClientError, EventStreamError

    body = json.dumps(request | {"stream": True})
    try:
        answer = client.invoke_endpoint_with_response_stream(
            EndpointName=name, ContentType="application/json", Accept="text/event-stream", Body=body
        )
        parts = (
            event["PayloadPart"]["Bytes"] for event in answer["Body"] if "PayloadPart" in event
        )
        yield from chunks(lines(parts))
    except EventStreamError as error:
        raise UserError(f"{name} broke off: {reason(error)}") from error
    except (BotoCoreError, ClientError) as error:
        raise UserError(refused(name, error)) from error


def lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, whatever the parts are: a character, too, may be cut in two."""
    left = b""
    for part in parts:
        *ready, left = (left + part).split(b"\n")
        yield from ready
    if left.strip():
        yield left


def chunks(found: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Of server-sent events: what stands behind `data:`, until [DONE]."""
    ended = False
    for line in found:
        text = line.strip()
        if not text.startswith(DATA):
            continue
        text = text.removeprefix(DATA).strip()
        if text == END:
            ended = True
            break
        yield read(text)
    if not ended:
        raise UserError("the stream ended before its [DONE]: the answer is not whole")


def read(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"the endpoint answered no JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise UserError(f"the endpoint answered no object: {text[:200]!r}")
    if "error" in found:
        told = found["error"]
        raise UserError(
            f"the container says: {told.get('message', told) if isinstance(told, dict) else told}"
        )
    return found


def text_of(answer: dict[str, Any]) -> str:
    """Of a whole answer or a chunk, a chat's or a completion's."""
    first = (answer.get("choices") or [{}])[0]
    said = first.get("delta") or first.get("message") or {}
    return said.get("content") or first.get("text") or ""


def refused(name: str, error: Exception) -> str:
    """What the container said, where it was the container that refused."""
    told = getattr(error, "response", {})
    if told.get("Error", {}).get("Code") == "ModelError":
        return f"the container of {name} answered {told.get('OriginalStatusCode')}: {told.get('OriginalMessage')}"
    return f"{name}: {reason(error)}"

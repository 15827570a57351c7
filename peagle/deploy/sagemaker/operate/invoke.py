"""Requests to an endpoint, with a whole or a streamed response."""

import json
from collections.abc import Iterator
from typing import Any

from peagle.deploy.response import join_lines, parse_events, parse_response
from peagle.deploy.sagemaker.operate.clients import error_message
from peagle.errors import UserError


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

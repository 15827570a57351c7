"""Events of the Responses API and of Anthropic's, checked with the types of their clients."""

import json
from functools import cache
from typing import Any, get_args

import httpx
from pydantic import BaseModel

from tests.support.api import clients


@cache
def event_models(union: Any) -> dict[str, type[BaseModel]]:
    """The models of a union of events by their types."""
    members = get_args(get_args(union)[0])
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in members}


def typed_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types; comments are left out."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def response_events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed response, in the order of their numbers."""
    events = typed_events(reply.text)
    models = event_models(clients.openai.types.responses.ResponseStreamEvent)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        models[event["type"]].model_validate(event)
    return events


def message_events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed message, without pings and errors, which have no type."""
    events = typed_events(reply.text)
    models = event_models(clients.anthropic.types.RawMessageStreamEvent)
    for event in events:
        if event["type"] not in ("ping", "error"):
            models[event["type"]].model_validate(event)
    return events


def event_types(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events; repeated ones once."""
    types = [event["type"] for event in events]
    return [name for i, name in enumerate(types) if i == 0 or types[i - 1] != name]

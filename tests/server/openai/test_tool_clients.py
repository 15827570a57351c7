"""The official openai client, unchanged, with tools against a live server; hostile bodies."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.server.front.engine_backend import EngineBackend
from tests.support.api import clients
from tests.support.api.tool_pair import SCHEMAS, TOOLS, tool_pair
from tests.support.server.serving import CHAT, all_idle, make_backend, running, until

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_tokens": 200,
    "temperature": 0,
    "tools": TOOLS,
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[EngineBackend, str]]:
    backend = make_backend(tool_pair)
    with running(backend) as (_, url):
        yield backend, url
        asyncio.run(until(lambda: all_idle(backend)))


def client_of(url: str) -> Any:
    return clients.openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)


def test_openai_client(live: tuple[EngineBackend, str]) -> None:
    """A call, its result, and the next call; whole and streamed."""
    client = client_of(live[1])
    whole = client.chat.completions.create(**BODY, tool_choice="required").choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    with client.chat.completions.stream(**BODY, tool_choice="required") as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls or []
    assert final.finish_reason == "tool_calls"
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments
    history = [
        *MESSAGES,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    named: Any = {"type": "function", "function": {"name": "clock"}}
    body = BODY | {"messages": history, "tool_choice": named}
    second = client.chat.completions.create(**body).choices[0].message.tool_calls or []
    assert [each.function.name for each in second if each.type == "function"] == ["clock"]


def test_openai_client_errors(live: tuple[EngineBackend, str]) -> None:
    client = client_of(live[1])
    with pytest.raises(clients.openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tool_choice="required")


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "f", "a b", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "parameters", "strict", "properties"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a b", ""]) | VALUES},
    optional={"parameters": VALUES, "description": VALUES, "strict": VALUES},
)
TOOL_FIELDS = st.fixed_dictionaries({"type": st.just("function") | VALUES, "function": FUNCTIONS})
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": VALUES, "arguments": VALUES})},
    optional={"id": VALUES, "type": VALUES},
)
HOSTILE_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={
        "content": VALUES,
        "tool_calls": st.lists(CALLS, max_size=2) | VALUES,
        "tool_call_id": VALUES,
        "reasoning_content": VALUES,
    },
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(HOSTILE_MESSAGES, min_size=1, max_size=3)},
    optional={
        "tools": st.lists(TOOL_FIELDS, max_size=3) | VALUES,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | VALUES,
        "parallel_tool_calls": VALUES,
        "reasoning_effort": VALUES,
        "max_thinking_tokens": VALUES,
        "chat_template_kwargs": VALUES,
    },
)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(body=BODIES)
def test_hostile_bodies(live: tuple[EngineBackend, str], body: dict[str, Any]) -> None:
    """Any tools and messages give an answer, or an error that names the mistake."""
    response = httpx.post(live[1] + CHAT, json=body | {"max_tokens": 2}, timeout=60)
    assert response.status_code in (200, 400), response.text
    assert response.status_code == 200 or response.json()["error"]["message"]

"""/v1/messages with the official client: text, tools, thinking, token counts, errors."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.loaded import LoadedPair
from tests.support.api import clients
from tests.support.api.api_events import event_types, message_events
from tests.support.api.junk import JUNK, mostly
from tests.support.api.tool_pair import SCHEMAS, THINKING_TEMPLATE, TOOLS, WEATHER, tool_pair
from tests.support.server.serving import (
    SETTINGS,
    WORDS,
    make_backend,
    paused,
    running,
    slowed,
    tiny_pair,
    until,
)

PATH = "/v1/messages"
USER: list[Any] = [{"role": "user", "content": WORDS}]
TEXT: dict[str, Any] = {"messages": USER, "max_tokens": 8}
GREEDY = {"temperature": 0}
FUNCTIONS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(make_backend(api_keys=("secret",))) as (_, url):
        yield url


@pytest.fixture(scope="module")
def tool_url() -> Iterator[str]:
    with running(make_backend(tool_pair, kv_tokens=16384)) as (_, url):
        yield url


def client_of(url: str, **fields: Any) -> Any:
    fields = fields or {"api_key": "secret"}
    return clients.anthropic.Anthropic(base_url=url, max_retries=0, **fields)


def post(url: str, path: str = PATH, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers={"x-api-key": "secret"}, timeout=60)


def test_text_answers(url: str) -> None:
    client = client_of(url)
    whole = client.messages.create(model="tiny", **TEXT, extra_body=GREEDY)
    (block,) = whole.content
    assert block.type == "text" and whole.stop_reason == "max_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (4, 8)
    assert whole.usage.cache_read_input_tokens == 0
    assert whole.model_extra is not None
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    with client.messages.stream(model="tiny", **TEXT, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == 8 and final.stop_reason == "max_tokens"

    events = message_events(post(url, **TEXT, **GREEDY, stream=True, peagle={"trace": True}))
    assert event_types(events) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    traces = [event["peagle"] for event in events if "peagle" in event]
    assert sum(trace["tokens"] for trace in traces) == 8
    assert events[-2]["metrics"] == whole.model_extra["metrics"]


def test_system_and_content_blocks(url: str) -> None:
    """Blocks and strings give the same prompt; successive messages of a role are joined."""
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "w4"}]},
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": [{"type": "text", "text": "w6"}]},
        {"role": "user", "content": [{"type": "text", "text": "w7", "cache_control": None}]},
    ]
    texts = [
        {"role": "user", "content": "w4 w5"},
        {"role": "assistant", "content": "w6"},
        {"role": "user", "content": "w7"},
    ]
    system = [{"type": "text", "text": "w2", "cache_control": {"type": "ephemeral"}}]
    one = post(url, messages=blocks, system=system, max_tokens=5, **GREEDY).json()
    two = post(url, messages=texts, system="w2", max_tokens=5, **GREEDY).json()
    assert one["content"] == two["content"]
    assert sum_input(one["usage"]) == sum_input(two["usage"]) == 9


def sum_input(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_stop_sequences(url: str) -> None:
    text = post(url, **TEXT, **GREEDY).json()["content"][0]["text"].split()
    stop = next(word for word in text if word != text[0])
    client = client_of(url)
    body: dict[str, Any] = {"stop_sequences": ["nothing", stop], "extra_body": GREEDY}
    whole = client.messages.create(model="tiny", **TEXT, **body)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert whole.content[0].type == "text" and stop not in whole.content[0].text
    with client.messages.stream(model="tiny", **TEXT, **body) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.content[0].type == "text" and final.content[0].text == whole.content[0].text


def test_tool_calls(tool_url: str) -> None:
    client = client_of(tool_url)
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "tools": FUNCTIONS}
    body["extra_body"] = GREEDY
    first = client.messages.create(messages=messages, tool_choice=ONE_CALL, **body)
    (call,) = first.content
    assert call.type == "tool_use" and first.stop_reason == "tool_use"
    jsonschema.validate(call.input, SCHEMAS[call.name])
    with client.messages.stream(messages=messages, tool_choice=ONE_CALL, **body) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 1 and json.loads("".join(pieces)) == call.input
    assert final.content[0].type == "tool_use" and final.content[0].input == call.input
    assert final.stop_reason == "tool_use"

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    messages += [
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "And the weather?"}]},
    ]
    named: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    second = client.messages.create(messages=messages, tool_choice=named, **body)
    (call,) = second.content
    assert call.type == "tool_use" and call.name == "weather"
    jsonschema.validate(call.input, WEATHER)
    assert (second.usage.cache_read_input_tokens or 0) > 0
    body["max_tokens"] = 4
    last = client.messages.create(messages=messages, tool_choice={"type": "none"}, **body)
    assert [block.type for block in last.content] == ["text"]


def test_count_tokens(tool_url: str) -> None:
    client = client_of(tool_url)
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    for fields in ({}, {"tools": FUNCTIONS}, {"tools": FUNCTIONS, "system": "Be brief."}):
        prompt: dict[str, Any] = {"model": "tiny", "messages": messages} | fields
        counted = client.messages.count_tokens(**prompt).input_tokens
        usage = client.messages.create(max_tokens=1, **prompt).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_thinking_blocks() -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 24,
        "extra_body": GREEDY | {"chat_template_kwargs": {"thinks": "inside"}},
    }
    thinking: Any = {"type": "enabled", "budget_tokens": 6}
    with running(make_backend(lambda: tool_pair(THINKING_TEMPLATE))) as (_, url):
        client = client_of(url)
        whole = client.messages.create(**body, thinking=thinking)
        with client.messages.stream(**body, thinking=thinking) as stream:
            final = stream.get_final_message()
        thought, text = whole.content
        assert thought.type == "thinking" and thought.thinking and text.type == "text"
        assert [block.model_dump(exclude={"parsed_output"}) for block in final.content] == [
            block.model_dump() for block in whole.content
        ]
        hidden = client.messages.create(**body, thinking=thinking | {"display": "omitted"})
        assert hidden.content[0].type == "thinking" and not hidden.content[0].thinking
        body["messages"] += [
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
            {"role": "user", "content": "And?"},
        ]
        counted = client.messages.count_tokens(
            model="tiny", messages=body["messages"], thinking={"type": "disabled"}
        )
        plain = client.messages.count_tokens(model="tiny", messages=body["messages"])
        assert counted.input_tokens > plain.input_tokens  # the closed thinking part


def test_output_format(tool_url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    reply = post(tool_url, messages=USER, max_tokens=99, output_config=form, **GREEDY).json()
    jsonschema.validate(json.loads(reply["content"][0]["text"]), schema)


def test_a_long_answer_ends_with_the_context() -> None:
    """Agents request more tokens than the context of small targets allows."""
    with running(make_backend(context=32)) as (_, url):
        reply = post(url, **TEXT | {"max_tokens": 32000}, **GREEDY).json()
        used = sum_input(reply["usage"]) + reply["usage"]["output_tokens"]
        assert (reply["stop_reason"] == "model_context_window_exceeded") == (used == 32)
        too_long = post(url, messages=[{"role": "user", "content": "w6 " * 40}], max_tokens=9)
        assert too_long.status_code == 400


def check_error(reply: httpx.Response, status: int, error_type: str) -> str:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body["error"]["type"] == error_type
    if error_type != "request_too_large":  # The client has no class for this error.
        clients.anthropic.types.shared.ErrorResponse.model_validate(body)
    return body["error"]["message"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": USER}, "max_tokens"),
        ({"max_tokens": 4}, "messages"),
        ({**TEXT, "messages": []}, "messages"),
        ({**TEXT, "messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({**TEXT, "messages": [*USER, {"role": "assistant", "content": "{"}]}, "last one"),
        ({**TEXT, "messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {**TEXT, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text is missing",
        ),
        ({**TEXT, "system": [{"type": "text"}]}, "system.0.text is missing"),
        ({**TEXT, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({**TEXT, "messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use"),
        (
            {**TEXT, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "tool_use_id",
        ),
        ({**TEXT, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({**TEXT, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({**TEXT, "tools": FUNCTIONS, "tool_choice": {"type": "tool"}}, "name"),
        ({**TEXT, "thinking": {"type": "enabled"}}, "budget_tokens"),
        ({**TEXT, "thinking": {"type": "between_tools"}}, "thinking"),
        ({**TEXT, "stop_sequences": [""]}, "stop_sequences"),
        ({**TEXT, "container": "c"}, "container"),
        ({**TEXT, "mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_invalid_bodies_are_refused(url: str, body: dict[str, Any], words: str) -> None:
    assert words in check_error(post(url, **body), 400, "invalid_request_error")


def test_errors_have_the_format_of_anthropic(url: str) -> None:
    with pytest.raises(clients.anthropic.AuthenticationError, match="wrong"):
        client_of(url, api_key="other").messages.create(model="tiny", **TEXT)
    by_token = client_of(url, auth_token="secret", api_key=None)
    assert by_token.messages.create(model="tiny", **TEXT).content
    check_error(httpx.post(url + PATH, timeout=60), 401, "authentication_error")
    check_error(post(url, **TEXT, model="claude"), 404, "not_found_error")
    check_error(post(url, f"{PATH}/batches"), 404, "not_found_error")
    headers = {"x-api-key": "secret"}
    check_error(httpx.get(url + PATH, headers=headers, timeout=60), 405, "invalid_request_error")
    reply = httpx.post(url + PATH, content=b"{", headers=headers, timeout=60)
    check_error(reply, 400, "invalid_request_error")
    reply = httpx.post(url + PATH, content=b"x" * (26 << 20), headers=headers, timeout=60)
    check_error(reply, 413, "request_too_large")


def test_errors_while_loading_and_with_a_full_queue() -> None:
    may_load = threading.Event()

    def load() -> LoadedPair:
        may_load.wait(timeout=60)
        return tiny_pair()

    backend = make_backend(load, max_queue=1, max_batch=1)
    with running(backend, ready=False) as (_, url), ExitStack() as stack:
        check_error(post(url, **TEXT), 503, "overloaded_error")
        may_load.set()
        asyncio.run(until(lambda: backend.engines.state == "ready"))
        client = stack.enter_context(httpx.Client(timeout=60))
        stack.enter_context(paused(backend))
        body = TEXT | {"stream": True}
        for _ in range(8):
            reply = stack.enter_context(client.stream("POST", url + PATH, json=body))
            if reply.status_code != 200:
                break
        reply.read()
        check_error(reply, 429, "rate_limit_error")


@pytest.mark.slow
def test_an_answer_that_fails_while_it_is_generated() -> None:
    backend = make_backend(timeout=2.0)
    backend.engines.settings = SETTINGS  # The engine may accept a request late.
    with running(backend) as (_, url), slowed(backend, 0.4):
        body = TEXT | {"max_tokens": 64}
        events = message_events(post(url, **body | GREEDY, stream=True))
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "timeout_error"
        client = client_of(url)
        with (
            pytest.raises(clients.anthropic.APIStatusError, match="not complete"),
            client.messages.stream(model="tiny", **body, extra_body=GREEDY) as stream,
        ):
            list(stream)
        check_error(post(url, **body | GREEDY), 504, "timeout_error")


PARTS = st.lists(mostly({"type": "text", "text": "hi"}), max_size=2)
USE = {"type": mostly("tool_use"), "id": mostly("c"), "name": mostly("clock")}
USE["input"] = st.dictionaries(st.just("zone"), JUNK, max_size=1)
RESULT = {"type": mostly("tool_result"), "tool_use_id": mostly("c"), "content": mostly("", PARTS)}
THOUGHT = {"type": mostly("thinking"), "thinking": mostly("hm"), "signature": mostly("")}
ANSWER = mostly("yes", PARTS, st.tuples(st.fixed_dictionaries(THOUGHT), st.fixed_dictionaries(USE)))
QUESTION = mostly("hi", PARTS, st.tuples(st.fixed_dictionaries(RESULT)))
TURNS = st.tuples(
    st.fixed_dictionaries({"role": mostly("user", "system"), "content": QUESTION}),
    st.fixed_dictionaries({"role": mostly("assistant"), "content": ANSWER}),
    st.fixed_dictionaries({"role": mostly("user"), "content": QUESTION}),
)
BODY = st.fixed_dictionaries(
    {"messages": mostly(TURNS)},
    optional={
        "system": mostly("be", PARTS),
        "tools": mostly(FUNCTIONS, st.lists(mostly(FUNCTIONS[0]), max_size=2)),
        "tool_choice": mostly({"type": "auto"}, {"type": "none"}),
        "thinking": mostly({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 9}),
        "output_config": mostly({"effort": "low"}),
        "metadata": mostly({"user_id": "me"}),
        "stop_sequences": mostly([], ["x"]),
        "stream": mostly(True),
    },
)


def test_malformed_bodies_are_no_server_errors(tool_url: str) -> None:
    statuses: set[int] = set()
    with httpx.Client(timeout=60) as client:

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(BODY, st.sampled_from([PATH, f"{PATH}/count_tokens"]))
        def check(body: dict[str, Any], path: str) -> None:
            reply = client.post(tool_url + path, json=body | {"max_tokens": 1})
            assert reply.status_code in (200, 400), (body, reply.text)
            assert reply.status_code == 200 or reply.json()["type"] == "error"
            assert "event: error" not in reply.text
            statuses.add(reply.status_code)

        check()
    assert statuses == {200, 400}

"""/v1/responses with the official client: text, tools, reasoning, stored responses, errors."""

import json
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.server.http.errors import ApiError
from peagle.server.responses import shared_response_store
from peagle.server.responses.response_store import ResponseStore, StoredResponse
from peagle.server.responses.shared_response_store import PATH_VARIABLE, SharedResponseStore
from tests.support.api import clients
from tests.support.api.api_events import event_types, response_events
from tests.support.api.junk import mostly
from tests.support.api.tool_pair import SCHEMAS, THINKING_TEMPLATE, TOOLS, WEATHER, tool_pair
from tests.support.server.serving import SETTINGS, WORDS, make_backend, running, slowed

PATH = "/v1/responses"
TEXT: dict[str, Any] = {"input": WORDS, "temperature": 0, "max_output_tokens": 8}
FUNCTIONS: list[Any] = [{"type": "function"} | tool["function"] for tool in TOOLS]
BOUND: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "tools": FUNCTIONS,
    "parallel_tool_calls": False,
}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with two keys."""
    with running(make_backend(api_keys=("one", "two"))) as (_, url):
        yield url


@pytest.fixture(scope="module")
def tool_url() -> Iterator[str]:
    with running(make_backend(tool_pair, kv_tokens=16384)) as (_, url):
        yield url


def client_of(url: str, key: str = "one") -> Any:
    return clients.openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def post(url: str, key: str = "one", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(url + PATH, json=body, headers=headers, timeout=60)


def test_text_answers(url: str) -> None:
    client = client_of(url)
    whole = client.responses.create(model="tiny", **TEXT, metadata={"a": "b"})
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.metadata == {"a": "b"} and whole.output_text
    usage = whole.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (4, 8)
    assert usage.total_tokens == 12 and usage.input_tokens_details.cached_tokens == 0
    assert whole.model_extra is not None
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": WORDS}], temperature=0, max_tokens=8
    )
    assert chat.choices[0].message.content == whole.output_text

    reply = post(url, **TEXT, stream=True)
    events = response_events(reply)
    assert event_types(events) == [*TEXT_EVENTS, "response.incomplete"]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert len(deltas) > 1 and "".join(deltas) == whole.output_text
    assert "[DONE]" not in reply.text
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == whole.output_text
    assert events[-2]["item"] == last["output"][0] and last["output"][0]["status"] == "incomplete"
    assert (
        last["metrics"]["speculative_decoding"]
        == whole.model_extra["metrics"]["speculative_decoding"]
    )


def test_traces_in_streams(url: str) -> None:
    events = response_events(post(url, **TEXT, stream=True, peagle={"trace": True}))
    traces = [event["peagle"] for event in events if "peagle" in event]
    assert sum(trace["tokens"] for trace in traces) == 8
    assert all(trace["k"] == 3 for trace in traces)


def test_input_items(url: str) -> None:
    """Items and instructions give the same prompt as chat messages."""
    items = [
        {"role": "developer", "content": "w3"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "w4"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "w5"}]},
        {"role": "user", "content": "w6"},
    ]
    response = post(url, input=items, instructions="w2", temperature=0, max_output_tokens=6).json()
    messages: Any = [
        {"role": "system", "content": "w2 w3"},
        {"role": "user", "content": "w4"},
        {"role": "assistant", "content": "w5"},
        {"role": "user", "content": "w6"},
    ]
    chat = client_of(url).chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=6
    )
    assert chat.usage is not None and response["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert response["output"][0]["content"][0]["text"] == chat.choices[0].message.content


def test_tool_calls_and_their_results(tool_url: str) -> None:
    client = client_of(tool_url)
    items: list[Any] = [{"role": "user", "content": "What time is it?"}]
    first = client.responses.create(input=items, tool_choice="required", **BOUND)
    assert first.status == "completed"
    (call,) = first.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])

    events = response_events(
        post(tool_url, input=items, tool_choice="required", **BOUND, stream=True)
    )
    assert event_types(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert len(deltas) > 1 and "".join(deltas) == call.arguments
    assert events[-1]["response"]["output"][0]["name"] == call.name

    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    named: Any = {"type": "function", "name": "weather"}
    second = client.responses.create(
        input=[*items, call.model_dump(), output], tool_choice=named, **BOUND
    )
    continued = client.responses.create(
        input=[output], previous_response_id=first.id, tool_choice=named, **BOUND
    )
    (call,) = second.output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    (same,) = continued.output
    assert same.type == "function_call" and same.arguments == call.arguments
    assert second.usage is not None and continued.usage is not None
    assert second.usage.input_tokens == continued.usage.input_tokens
    assert continued.usage.input_tokens_details.cached_tokens > 0


def test_allowed_tools_and_none(tool_url: str) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    body = post(tool_url, input="x", tool_choice=allowed, **BOUND).json()
    assert [item["name"] for item in body["output"]] == ["weather"]
    body = post(tool_url, input="x", tool_choice="none", **BOUND, max_output_tokens=4).json()
    assert [item["type"] for item in body["output"]] == ["message"]


def test_reasoning_items() -> None:
    body: dict[str, Any] = {
        "input": "Why?",
        "temperature": 0,
        "max_output_tokens": 24,
        "max_thinking_tokens": 6,
        "chat_template_kwargs": {"thinks": "inside"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    with running(make_backend(lambda: tool_pair(THINKING_TEMPLATE))) as (_, url):
        whole = post(url, **body).json()
        events = response_events(post(url, **body, stream=True))
        reasoning, message = whole["output"]
        assert reasoning["type"] == "reasoning" and message["type"] == "message"
        deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == reasoning["content"][0]["text"]
        assert event_types(events)[2:8] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        items = [{"role": "user", "content": "Why?"}, *whole["output"]]
        again = post(url, input=[*items, {"role": "user", "content": "And?"}], max_output_tokens=4)
        assert again.status_code == 200


def test_text_formats(tool_url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    body = post(tool_url, input="x", temperature=0, text={"format": form}).json()
    assert body["status"] == "completed" and body["text"]["format"] == form
    text = body["output"][0]["content"][0]["text"]
    jsonschema.validate(json.loads(text), schema)
    with client_of(tool_url).responses.stream(
        model="tiny",
        input="x",
        temperature=0,
        text={"format": form},  # type: ignore[typeddict-item]
    ) as stream:
        assert stream.get_final_response().output_text == text


def test_previous_responses(url: str) -> None:
    client = client_of(url)
    first = client.responses.create(model="tiny", **TEXT, instructions="w9 w9")
    second = client.responses.create(
        model="tiny", **TEXT | {"input": "w7"}, previous_response_id=first.id
    )
    items = [
        {"role": "user", "content": WORDS},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "w7"},
    ]
    whole = post(url, **TEXT | {"input": items}).json()
    assert whole["output"][0]["content"][0]["text"] == second.output_text
    assert second.usage is not None
    assert whole["usage"]["input_tokens"] == second.usage.input_tokens  # without instructions
    assert client.responses.retrieve(first.id) == first

    other = client_of(url, "two")
    for stranger, salt in ((other, {}), (client, {"cache_salt": "mine"})):
        with pytest.raises(clients.openai.NotFoundError, match="this API key and cache_salt"):
            stranger.responses.create(
                model="tiny", input="w7", previous_response_id=first.id, extra_body=salt
            )
        with pytest.raises(clients.openai.NotFoundError):
            stranger.responses.retrieve(first.id, extra_query=salt)
        with pytest.raises(clients.openai.NotFoundError):
            stranger.responses.delete(first.id, extra_query=salt)
    client.responses.delete(first.id)
    with pytest.raises(clients.openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    unstored = post(url, **TEXT, store=False).json()
    assert post(url, **TEXT, previous_response_id=unstored["id"]).status_code == 404
    salted = post(url, **TEXT, cache_salt="mine", stream=True)
    salted_id = response_events(salted)[-1]["response"]["id"]
    assert client.responses.retrieve(salted_id, extra_query={"cache_salt": "mine"}).id == salted_id


def test_several_web_servers_share_responses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "responses"))
    with (
        running(make_backend(http_workers=2)) as (_, url),
        running(make_backend(http_workers=2)) as (_, other),
    ):
        first = post(url, **TEXT)
        assert first.status_code == 200 and first.json()["store"] is True
        continued = post(other, **TEXT, previous_response_id=first.json()["id"])
        assert continued.status_code == 200
        path = f"{PATH}/{first.json()['id']}"
        assert httpx.get(f"{other}{path}", timeout=60).json() == first.json()
        assert httpx.delete(f"{other}{path}").status_code == 200
        assert httpx.get(f"{url}{path}", timeout=60).status_code == 404
    assert (tmp_path / "responses").stat().st_mode & 0o077 == 0


def stored(size: int, key: bytes = b"") -> StoredResponse:
    return StoredResponse(key, key.decode(), b"x" * size, b"")


def create_store(folder: Path, shared: bool, **limits: int) -> ResponseStore | SharedResponseStore:
    return SharedResponseStore(folder / "file", **limits) if shared else ResponseStore(**limits)


@pytest.mark.parametrize("shared", [False, True])
def test_the_store_is_bounded(tmp_path: Path, shared: bool) -> None:
    store = create_store(tmp_path, shared, keys=1, max_responses=3, max_bytes=100)
    for i in range(4):
        store.put(str(i), stored(10))
    assert len(store) == 3 and store.get("0", "") is None and store.get("1", "")
    store.put("large", stored(95))
    assert len(store) == 1 and store.size == 95
    store.put("too large", stored(101))
    assert store.get("too large", "") is None and store.get("large", "")
    assert store.delete("large", "") and not store.delete("large", "")
    assert len(store) == 0 and store.size == 0


def test_the_size_of_a_response_is_read_without_its_text(tmp_path: Path) -> None:
    SharedResponseStore(tmp_path / "file")
    columns = sqlite3.connect(tmp_path / "file").execute("PRAGMA table_info(responses)")
    names = [column[1] for column in columns]
    assert names.index("size") < min(names.index("response"), names.index("messages"))


def test_answers_are_returned_if_the_database_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_response_store, "LOCK_SECONDS", 0.01)
    store = SharedResponseStore(tmp_path / "file")
    other = sqlite3.connect(tmp_path / "file", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.INFO, "peagle.server"):
        store.put("locked", stored(10))
    assert "response not stored" in caplog.text and store.get("locked", "") is None
    other.execute("ROLLBACK")
    store.put("free", stored(10))
    assert store.get("free", "")


def test_a_locked_database_is_read_but_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_response_store, "LOCK_SECONDS", 0.01)
    store = SharedResponseStore(tmp_path / "file")
    store.put("kept", stored(10))
    other = sqlite3.connect(tmp_path / "file", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert store.get("kept", "")
    with pytest.raises(ApiError, match="try again") as failure:
        store.delete("kept", "")
    assert failure.value.status == 503
    other.execute("ROLLBACK")
    assert store.delete("kept", "")


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_does_not_evict_the_responses_of_others(tmp_path: Path, shared: bool) -> None:
    store = create_store(tmp_path, shared, keys=2, max_responses=8, max_bytes=400)
    store.put("mine", stored(10, b"a"))
    for i in range(50):
        store.put(f"b{i}", stored(60, b"b"))
    assert store.get("mine", "a") and store.get("mine", "b") is None
    assert store.get("b49", "b") and store.get("b48", "b") is None
    assert len(store) == 2 and store.size == 70


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "judge", "content": "x"}]}, "role"),
        ({"input": [{"role": "user"}]}, "input.0.content: is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text: is missing",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "custom"),
        ({"input": "x", "tools": [{"type": "function"}]}, "name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": "always"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "mcp", "server_label": "x"}}, "mcp"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "top_logprobs": 3}, "logprobs"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "effort"),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "peagle": {"method": "magic"}}, "method"),
    ],
)
def test_invalid_bodies_are_refused(url: str, body: dict[str, Any], words: str) -> None:
    reply = post(url, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and words in error["message"]


def test_other_errors(url: str) -> None:
    assert post(url, key="three", **TEXT).status_code == 401
    assert post(url, **TEXT, model="other").status_code == 404
    assert post(url, **TEXT, previous_response_id="resp_x").status_code == 404
    assert httpx.get(f"{url}{PATH}", headers={"x-api-key": "one"}, timeout=60).status_code == 405


def test_an_answer_that_fails_while_it_is_generated() -> None:
    backend = make_backend(timeout=2.0)
    backend.engines.settings = SETTINGS  # The engine may accept a request late.
    with running(backend) as (_, url), slowed(backend, 0.4):
        events = response_events(post(url, **TEXT | {"max_output_tokens": 64}, stream=True))
        client = client_of(url)
        with pytest.raises(clients.openai.InternalServerError):
            client.responses.create(model="tiny", input=WORDS, max_output_tokens=64, temperature=0)
    error, failed = events[-2:]
    assert error["type"] == "error" and "not complete" in error["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["message"] == error["message"]


PARTS = st.lists(mostly({"type": "input_text", "text": "hi"}), max_size=2)
ARGUMENTS = ["{}", "[", '{"a": NaN}', "\ud7ff", '{"a": "\\ud800"}', '{"a": {"b": [1]}}']
MESSAGE = {"role": mostly("user", "assistant", "system", "developer"), "content": mostly("", PARTS)}
CALL = {"type": mostly("function_call"), "call_id": mostly("c"), "name": mostly("clock")}
CALL["arguments"] = mostly(*ARGUMENTS)
RESULT = {
    "type": mostly("function_call_output"),
    "call_id": mostly("c"),
    "output": mostly("", PARTS),
}
REASONING = {"type": mostly("reasoning"), "summary": mostly([]), "content": mostly(None, PARTS)}
ITEM = st.one_of([st.fixed_dictionaries(item) for item in (MESSAGE, CALL, RESULT, REASONING)])
BODY = st.fixed_dictionaries(
    {"input": mostly("hi", st.lists(mostly(ITEM), max_size=5))},
    optional={
        "tools": mostly(FUNCTIONS, st.lists(mostly(FUNCTIONS[0]), max_size=2)),
        "tool_choice": mostly("auto", "none"),
        "text": mostly({"format": {"type": "text"}}),
        "reasoning": mostly({"effort": "low"}),
        "include": mostly([]),
        "metadata": mostly({"a": "b"}),
        "store": mostly(True),
        "stream": mostly(True),
        "chat_template_kwargs": mostly({"thinks": "inside"}),
        "instructions": mostly("be"),
    },
)


def test_malformed_bodies_are_no_server_errors(tool_url: str) -> None:
    statuses: set[int] = set()
    with httpx.Client(timeout=60) as client:

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(BODY)
        def check(body: dict[str, Any]) -> None:
            reply = client.post(tool_url + PATH, json=body | {"max_output_tokens": 1})
            assert reply.status_code in (200, 400, 404), (body, reply.text)
            assert "response.failed" not in reply.text
            statuses.add(reply.status_code)

        check()
    assert {200, 400} <= statuses

"""Errors as clients see them: status, OpenAI's format, no internal details."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from peagle.errors import UserError
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.settings import ServerSettings
from tests.support.server.serving import (
    CHAT,
    HELLO,
    SETTINGS,
    TEXT,
    client_of,
    events,
    make_backend,
    paused,
    served,
    tiny_pair,
    until,
)


def error_of(reply: httpx.Response, code: int) -> dict[str, Any]:
    assert reply.status_code == code, reply.text
    assert "Traceback" not in reply.text and 'File "' not in reply.text
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["code"] == code
        and error["message"]
    )
    return error


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no messages": (CHAT, {"messages": None}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "role missing": (CHAT, {"messages": [{"content": "w6"}]}, "role"),
    "content missing": (CHAT, {"messages": [*HELLO, {"role": "user"}]}, "messages.1.content"),
    "content null": (CHAT, {"messages": [{"role": "user", "content": None}]}, "give a text"),
    "content of a result": (CHAT, {"messages": [{"role": "tool"}]}, "messages.0.content"),
    "calls of a user": (
        CHAT,
        {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages.0.content",
    ),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "text only",
    ),
    "template's own": (CHAT, {"messages": [{"role": "bad", "content": "w6"}]}, "no such role"),
    "template smuggled": (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
    "negative temperature": (CHAT, {"temperature": -1}, "temperature"),
    "text temperature": (CHAT, {"temperature": "hot"}, "temperature"),
    "top_p 0": (CHAT, {"top_p": 0}, "top_p"),
    "top_k": (CHAT, {"top_k": -2}, "top_k"),
    "min_p": (CHAT, {"min_p": 1.5}, "min_p"),
    "negative tokens": (CHAT, {"max_tokens": -1}, "max_tokens"),
    "prompt is empty": (CHAT, {"max_tokens": 0}, "max_tokens"),
    "no tokens of a completion": (TEXT, {"max_tokens": 0}, "echo"),
    "half a token": (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    "long model": (CHAT, {"model": "w" * 513}, "512"),
    "model's type": (CHAT, {"model": 0}, "model"),
    "long method": (CHAT, {"peagle": {"method": "w" * 513}}, "512"),
    "n 0": (CHAT, {"n": 0}, "n"),
    "n too large": (CHAT, {"n": 1000}, "n"),
    "negative seed": (CHAT, {"seed": -1}, "seed"),
    "huge seed": (CHAT, {"seed": 2**70}, "seed"),
    "empty stop": (CHAT, {"stop": ""}, "stop"),
    "many stops": (CHAT, {"stop": ["a"] * 100}, "stop"),
    "penalty": (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    "repetition": (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    "bias": (CHAT, {"logit_bias": {"5": 1000}}, "logit_bias"),
    "bias of a word": (CHAT, {"logit_bias": {"the": 1}}, "logit_bias"),
    "bias outside": (CHAT, {"logit_bias": {"5000": 1}}, "vocabulary"),
    "min above max": (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    "top_logprobs alone": (CHAT, {"top_logprobs": 2}, "logprobs"),
    "too many logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "json": (CHAT, {"response_format": {"type": "json_object"}}, "grammar"),
    "schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "grammar",
    ),
    "tools": (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    "tool choice": (CHAT, {"tool_choice": "required"}, "tool_choice"),
    "tool choice's type": (CHAT, {"tool_choice": {"type": "x"}}, "tool_choice.type: "),
    "guided": (CHAT, {"guided_regex": "a+"}, "grammar"),
    "special tokens": (CHAT, {"skip_special_tokens": False}, "special"),
    "stream options alone": (CHAT, {"stream_options": {"include_usage": True}}, "stream"),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "w6 " * 300}]}, "context"),
    "far too long": (CHAT, {"messages": [{"role": "user", "content": "w6 " * 30000}]}, "context"),
    "answer too long": (CHAT, {"max_tokens": 300}, "max_tokens"),
    "unknown method": (CHAT, {"peagle": {"method": "medusa"}}, "not served"),
    "bad k": (CHAT, {"peagle": {"k": 0}}, "k"),
    "no prompt": (TEXT, {"prompt": None}, "prompt"),
    "empty prompt": (TEXT, {"prompt": ""}, "prompt is empty"),
    "empty list": (TEXT, {"prompt": []}, "prompt"),
    "mixed list": (TEXT, {"prompt": [1, "w6"]}, "prompt"),
    "negative id": (TEXT, {"prompt": [-4]}, "prompt"),
    "id outside": (TEXT, {"prompt": [3, 4000]}, "vocabulary"),
    "best of": (TEXT, {"best_of": 3}, "best_of"),
    "suffix": (TEXT, {"suffix": "end"}, "suffix"),
    "stream is text": (TEXT, {"stream": "perhaps"}, "stream"),
    "too many answers": (TEXT, {"prompt": ["w6"] * 30, "n": 100}, "queue"),
}


def test_invalid_values_are_400() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        for name, (path, body, words) in BAD.items():
            base: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "w6"}
            error = error_of(await client.post(path, json=base | {"max_tokens": 4} | body), 400)
            assert words in error["message"], (name, error)
            assert error["type"] == "invalid_request_error"

    served(test)


def test_tokenize_needs_the_content_of_messages() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        reply = await client.post("/tokenize", json={"messages": [{"role": "user"}]})
        assert error_of(reply, 400)["param"] == "messages.0.content"

    served(test)


RAW = {
    "not JSON": (b"{no", "not JSON"),
    "no body": (b"", "not JSON"),
    "a list": (b"[]", "object"),
    "broken UTF-8": (b'{"messages": "\xff\xfe"}', "UTF-8"),
    "deep": (b'{"messages": ' + b"[" * 100000 + b"]" * 100000 + b"}", "nested"),
    "rather deep": (b'{"x": ' + b"[" * 80 + b"]" * 80 + b"}", "nested"),
    "NaN": (b'{"messages": [{"role": "user", "content": "w6"}], "temperature": NaN}', "NaN"),
    "Infinity": (
        b'{"messages": [{"role": "user", "content": "w6"}], "temperature": -Infinity}',
        "Infinity",
    ),
    "1e999": (
        b'{"messages": [{"role": "user", "content": "w6"}], "temperature": 1e999}',
        "temperature",
    ),
    "long number": (b'{"messages": [], "max_tokens": ' + b"9" * 5000 + b"}", "JSON"),
    "half a pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
}


def test_malformed_bodies_are_400() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        headers = {"content-type": "application/json"}
        for name, (body, words) in RAW.items():
            for path in (CHAT, "/invocations", *(["/tokenize"] if name != "1e999" else [])):
                error = error_of(await client.post(path, content=body, headers=headers), 400)
                assert words in error["message"], (name, error)
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (
            "application/json"
            in error_of(await client.post(CHAT, content=b"{}", headers=form), 415)["message"]
        )

    served(test)


def test_long_bodies_are_413() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        body = json.dumps({"messages": HELLO, "x": "a" * 2000})
        headers = {"content-type": "application/json"}
        assert (
            "--max-body-mb"
            in error_of(await client.post(CHAT, content=body, headers=headers), 413)["message"]
        )

        async def pieces() -> AsyncIterator[bytes]:  # no content-length
            for _ in range(100):
                yield b"a" * 100

        error_of(await client.post(CHAT, content=pieces(), headers=headers), 413)

    served(test, max_body_mb=1000 / (1 << 20))


def test_unknown_paths_models_and_methods() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        error_of(await client.get("/v1/nothing"), 404)
        error_of(await client.get(CHAT), 405)
        error = error_of(await client.post(CHAT, json={"messages": HELLO, "model": "tony"}), 404)
        assert "Did you mean 'tiny'" in error["message"]
        error_of(await client.get("/page/../../errors.py"), 404)

    served(test)


def test_api_keys() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        body = {"messages": HELLO, "max_tokens": 2}
        for path in (CHAT, "/invocations", "/tokenize", "/v1/models/x"):
            assert (
                error_of(await client.post(path, json=body), 401)["type"] == "authentication_error"
            )
        for header in (
            "Bearer wrong",
            "Basic one",
            "Bearer",
            "Bearer onetwo",
            "one",
            "Bearer \xe9",
        ):
            headers: Any = {"authorization": header.encode("latin-1")}
            error_of(await client.post(CHAT, json=body, headers=headers), 401)
        for key in ("one", "two"):
            headers_of = {"authorization": f"Bearer {key}"}
            assert (await client.post(CHAT, json=body, headers=headers_of)).status_code == 200
        for path in ("/health", "/ping", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200

    served(test, api_keys=("one", "two"))


def test_request_ids() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        given = await client.post(
            CHAT, json={"messages": HELLO}, headers={"x-request-id": "mine-7"}
        )
        assert given.headers["x-request-id"] == "mine-7" and given.json()["id"] == "chatcmpl-mine-7"
        replaced = await client.get("/v1/models", headers={"x-request-id": 'a"b' + "c" * 500})
        assert len(replaced.headers["x-request-id"]) == 32

    served(test)


def test_a_full_queue_is_429() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        assert front.engines.main is not None
        engine = front.engines.main.engine
        body = {"prompt": "w6 w9", "max_tokens": 4, "temperature": 0}
        with paused(front):
            waiting = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(5)]
            await until(lambda: sum(task.done() for task in waiting) == 2)
            await until(lambda: len(engine.loop.scheduler.waiting) == 3)
        done = [await task for task in waiting]
        assert sorted(reply.status_code for reply in done) == [200, 200, 200, 429, 429]
        full = next(reply for reply in done if reply.status_code == 429)
        assert (
            full.headers["retry-after"] == "1" and error_of(full, 429)["type"] == "rate_limit_error"
        )

    served(test, max_queue=3)


def test_a_request_with_more_choices_than_queue_slots_is_429() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        assert front.engines.main is not None
        scheduler = front.engines.main.engine.loop.scheduler
        with paused(front):
            first = asyncio.create_task(
                client.post(TEXT, json={"prompt": "w6", "max_tokens": 4, "n": 2})
            )
            await until(lambda: len(scheduler.waiting) == 2)
            error_of(await client.post(TEXT, json={"prompt": "w6", "max_tokens": 4, "n": 3}), 429)
        assert (await first).status_code == 200

    served(test, max_queue=3)


def test_loading_is_503() -> None:
    async def main() -> None:
        go = threading.Event()

        def load_slowly() -> Any:
            go.wait(60)
            return tiny_pair()

        front = make_backend(load_slowly)
        async with client_of(front, ready=False) as client:
            for path in ("/health", "/ping"):
                assert "loading" in error_of(await client.get(path), 503)["message"]
            reply = await client.post(CHAT, json={"messages": HELLO})
            assert "loading" in error_of(reply, 503)["message"] and reply.headers["retry-after"]
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            assert "peagle:engine_up" in (await client.get("/metrics")).text
            go.set()
            await until(lambda: front.is_healthy)
            assert (await client.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_pair_that_cannot_be_loaded_is_a_failure() -> None:
    async def main() -> None:
        def never() -> Any:
            raise UserError("no such pair")

        failures: list[str] = []
        front = make_backend(never)
        front.engines.on_failure = failures.append
        async with client_of(front, ready=False) as client:
            await until(lambda: failures)
            assert failures == ["no such pair"]
            error_of(await client.get("/health"), 503)

    asyncio.run(main())


def test_the_time_limit_is_504() -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        front.engines.settings = SETTINGS  # The engine may accept a request late.
        with paused(front):
            error_of(await client.post(TEXT, json={"prompt": "w6", "max_tokens": 4}), 504)
            reply = await client.post(TEXT, json={"prompt": "w6", "max_tokens": 4, "stream": True})
        assert events(reply.text)[-1]["error"]["type"] == "timeout_error"

    served(test, timeout=0.5)


def test_an_unexpected_error_is_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        monkeypatch.setattr(front.engines, "choose", lambda *_: 1 / 0)
        error = error_of(await client.post(TEXT, json={"prompt": "w6"}), 500)
        assert "ZeroDivision" not in error["message"] and error["type"] == "server_error"

    served(test)


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """Restore the loggers: the stderr of a test is closed when it ends."""
    yield
    for name in ("peagle.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True


def test_logs_have_no_prompts(restored_loggers: None, capfd: pytest.CaptureFixture[str]) -> None:
    from peagle.server.http.logs import set_up_logging

    set_up_logging()

    async def test(client: httpx.AsyncClient, front: EngineBackend) -> None:
        for quiet in (
            "/health",
            "/metrics",
            "/v1/peagle/status",
        ):  # Health checks arrive every few seconds.
            assert (await client.get(quiet)).status_code == 200
        body = {"prompt": "w6 w77", "max_tokens": 4, "ignore_eos": True}
        await client.post(TEXT, json=body, headers={"x-request-id": "seen"})

    for log_prompts in (False, True):
        served(test, log_prompts=log_prompts)
        lines = [
            json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")
        ]
        line = next(line for line in lines if line["event"] == "request")
        assert line["request_id"] == "seen" and line["status"] == 200 and line["path"] == TEXT
        assert line["completion_tokens"] == 4 and line["engine"] == "p-eagle" and line["ttft"] >= 0
        assert ("w77" in json.dumps(lines)) == log_prompts


MISTAKES = {
    "port": {"port": 70000},
    "batch": {"max_batch": 0},
    "queue": {"max_queue": 0},
    "chunk": {"chunk": 0},
    "key": {"api_keys": ("",)},
    "timeout": {"timeout": float("nan")},
    "body": {"max_body_mb": 0},
    "pages": {"kv_tokens": 1},
}


@pytest.mark.parametrize("changes", MISTAKES.values(), ids=MISTAKES.keys())
def test_invalid_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="`"):
        replace(SETTINGS, **changes)


def test_served_model_names() -> None:
    assert ServerSettings().model_names[0] == "smollm2-135m"
    assert ServerSettings(served_model_names=("a", "b")).model_names == ("a", "b")
    assert (
        ServerSettings(host="0.0.0.0").is_open_to_network
        and not ServerSettings().is_open_to_network
    )
    assert not ServerSettings(host="0.0.0.0", api_keys=("x",)).is_open_to_network

"""Structured answers over HTTP: OpenAI's response_format, and vLLM's fields for the same."""

import asyncio
import json
import re
import threading
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest

from peagle.catalog.pair import DrafterSource, Pair, TargetSource
from peagle.grammar import Grammar, GrammarCompiler, matcher
from peagle.loaded import LoadedPair
from peagle.server.front.engine_backend import EngineBackend
from tests.support.grammar_bombs import RULES
from tests.support.grammars import BOB, COMPACT, LATE, bound_pair
from tests.support.server import serving
from tests.support.server.serving import CHAT, TEXT, until

SCHEMA = {"type": "json_schema", "json_schema": {"name": "bob", "schema": BOB, "strict": True}}


def pair() -> LoadedPair:
    loaded = bound_pair()
    named = Pair(
        "tiny", TargetSource(order=("folder",)), dict.fromkeys(loaded._drafters, DrafterSource())
    )
    return LoadedPair(named, loaded.target, loaded._drafters)


served = partial(serving.served, loader=pair)
ask = partial(serving.ask, words="name", max_tokens=100)


async def content(client: httpx.AsyncClient, **body: Any) -> str:
    choice = (await ask(client, **body))["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def test_json_schema() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        text = await content(client, response_format=SCHEMA)
        jsonschema.validate(json.loads(text), BOB)
        for more in (
            {"peagle": {"method": "none"}},
            {"peagle": {"method": "eagle3"}},
            {"peagle": {"k": 7}},
        ):
            assert await content(client, response_format=SCHEMA, **more) == text
        answer = await ask(client, response_format=SCHEMA, n=3, temperature=1.2, seed=4)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert len(set(texts)) == 3
        for text in texts:
            jsonschema.validate(json.loads(text), BOB)

    served(test)


def test_streams_and_logprobs() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        fields = {"response_format": SCHEMA, "logprobs": True, "top_logprobs": 5}
        whole = (await ask(client, **fields))["choices"][0]
        chunks = await ask(client, stream=True, **fields)
        streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in streamed)
        assert text == whole["message"]["content"] and streamed[-1]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), BOB)
        entries = whole["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == text
        assert entries[0]["token"].startswith("{")
        assert all(entry["token"].startswith("{") for entry in entries[0]["top_logprobs"])
        assert all(top["logprob"] > -9999 for entry in entries for top in entry["top_logprobs"])

    served(test)


def test_json_object() -> None:
    """The logit bias makes a random target close its object."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        close = {
            str(bound_pair().target.tokenizer.convert_tokens_to_ids(token)): 100
            for token in ('"}', "}", "{}")
        }
        for field in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ):
            assert isinstance(json.loads(await content(client, logit_bias=close, **field)), dict)
        free = (await ask(client, response_format={"type": "text"}, max_tokens=8))["choices"][0][
            "message"
        ]["content"]
        assert free == (await ask(client, max_tokens=8))["choices"][0]["message"]["content"]
        assert not free.startswith("{")

    served(test)


LIST = COMPACT | {"type": "array", "items": {"enum": ["ok", 12]}, "minItems": 1, "maxItems": 3}
VLLM_FIELDS: dict[str, tuple[Any, str]] = {
    "json": (LIST, r"\[.*\]"),
    "regex": ("[0-9]{3}-[a-c]{2}", "[0-9]{3}-[a-c]{2}"),
    "choice": (["yes", "no"], "yes|no"),
    "grammar": ('root ::= "ab" | "(" root ")" | "[" root "]"', r"[(\[]*ab[)\]]*"),
}


@pytest.mark.parametrize("kind", VLLM_FIELDS)
def test_vllm_fields(kind: str) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        value, pattern = VLLM_FIELDS[kind]
        push = {str(bound_pair().target.tokenizer.convert_tokens_to_ids("ab")): 50}
        text = await content(client, logit_bias=push, **{f"guided_{kind}": value})
        assert re.fullmatch(pattern, text, re.DOTALL)
        same = {kind: value, "whitespace_pattern": None}
        assert text == await content(client, logit_bias=push, structured_outputs=same)
        answer = await ask(
            client, TEXT, logit_bias=push, guided_decoding_backend=None, **{f"guided_{kind}": value}
        )
        assert re.fullmatch(pattern, answer["choices"][0]["text"], re.DOTALL)

    served(test)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"response_format": {"type": "xml"}}, "json_schema", "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "missing", "response_format"),
    "empty": (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "required",
        "response_format",
    ),
    "bad schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "strin"}},
            }
        },
        "strin",
        "response_format",
    ),
    "unsupported": (
        {"guided_json": {"type": "array", "uniqueItems": True}},
        "uniqueItems",
        "guided_json",
    ),
    "text schema": ({"guided_json": "{"}, "EOF", "guided_json"),
    "regex": ({"guided_regex": "(?=a)b"}, "look-around", "guided_regex"),
    "choice": ({"guided_choice": []}, "choose", "guided_choice"),
    "choices": ({"guided_choice": [1, 2]}, "string", "guided_choice"),
    "grammar": ({"guided_grammar": "start: nobody"}, "nobody", "guided_grammar"),
    "large": ({"guided_regex": "a" * 300_000}, "smaller", "guided_regex"),
    "two": ({"guided_regex": "a", "guided_choice": ["a"]}, "both", "guided_choice"),
    "tag": (
        {"structured_outputs": {"structural_tag": "{}"}},
        "not supported",
        "structured_outputs.structural_tag",
    ),
    "backend": (
        {"guided_regex": "a", "guided_decoding_backend": "outlines"},
        "llguidance",
        "guided_decoding_backend",
    ),
    "nothing": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": False}}},
        "nothing",
        "response_format",
    ),
    "eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", ""),
}


def test_invalid_formats_are_refused() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for name, (body, word, param) in BAD.items():
            error = (await ask(client, code=400, **body))["error"]
            assert word in error["message"], (name, error)
            assert (error["param"] or "").startswith(param), (name, error)
            assert "\n" not in error["message"]
        assert await content(client, guided_choice=["yes"]) == "yes"

    served(test)


def test_any_json_and_grammars_that_fail_during_generation() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        whatever = {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}
        digit = {str(bound_pair().target.tokenizer.convert_tokens_to_ids("1")): 100}
        text = (await ask(client, response_format=whatever, logit_bias=digit, max_tokens=3))[
            "choices"
        ][0]
        assert text["message"]["content"] == "111"
        for stream in (False, True):
            reply = await ask(
                client,
                code=200 if stream else 400,
                guided_json=LATE.text,
                stream=stream,
                max_tokens=200,
            )
            error = reply[-1]["error"] if stream else reply["error"]
            assert error["code"] == 400 and "cannot follow its grammar" in error["message"]
        page = (await client.get("/metrics")).text
        assert 'finished_reason="refused",model_name="tiny"} 2.0' in page
        assert 'finished_reason="error",model_name="tiny"} 0.0' in page

    served(test)


async def until_no_jobs(backend: EngineBackend) -> None:
    await until(lambda: not backend.engines.grammar_queue.running)


# A bomb is ended because others wait, or because it reaches its memory limit before that.
REFUSED = (400, 429)


async def post_bomb(client: httpx.AsyncClient, number: int) -> httpx.Response:
    message = {"role": "user", "content": "name"}
    body = {"messages": [message], "guided_grammar": f"{RULES} // {number}", "user": "a"}
    return await client.post(CHAT, json=body)


def test_bombs_delay_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user sends more bombs than there are turns; another user's grammar is compiled early."""

    def end_bombs_after(seconds: float) -> None:
        monkeypatch.setattr("peagle.server.front.grammar_queue.CONTENDED_SECONDS", seconds)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        queue = backend.engines.grammar_queue
        end_bombs_after(60)
        await content(client, guided_regex="ok")
        bombs = [asyncio.create_task(post_bomb(client, i)) for i in range(6)]
        await until(lambda: queue.waiting == 4)
        assert (await ask(client, max_tokens=2))["choices"]
        other = asyncio.create_task(content(client, guided_regex="ab{3}", user="b"))
        await until(lambda: queue.waiting == 5)
        end_bombs_after(0.2)
        await until(lambda: sum(bomb.done() for bomb in bombs) >= 2)
        end_bombs_after(60)  # The next turns go to a bomb and to the other user.
        assert await other == "abbb"
        assert sum(bomb.done() for bomb in bombs) < 6, "the users did not take turns"
        end_bombs_after(0.2)
        for bomb in bombs[:4]:
            assert (await bomb).status_code in REFUSED
        for bomb in bombs[4:]:
            bomb.cancel()
        await until_no_jobs(backend)

    served(test)


def test_a_full_queue_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.server.front.grammar_queue.WAIT_SECONDS", 2.0)
    monkeypatch.setattr("peagle.server.front.grammar_queue.CONTENDED_SECONDS", 60.0)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await content(client, guided_regex="ok")
        queue = backend.engines.grammar_queue
        queue.max_waiting = 1
        bombs = [asyncio.create_task(post_bomb(client, i)) for i in range(3)]
        await until(lambda: queue.waiting == 1)
        error = (await ask(client, code=429, guided_regex="ab"))["error"]
        assert "1 grammars are waiting" in error["message"] and error["param"] == "guided_regex"
        assert (await bombs[2]).status_code in REFUSED
        for bomb in bombs:
            bomb.cancel()
        await until_no_jobs(backend)
        assert await content(client, guided_regex="ab") == "ab"

    served(test)


def test_a_shared_job_ends_after_its_last_client_disconnects() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        queue, compiler = backend.engines.grammar_queue, backend.engines.require_text().grammars
        bomb = Grammar("lark", RULES)
        clients = [asyncio.create_task(queue.compile(compiler, bomb, "")) for _ in range(3)]
        await until(lambda: queue.running == 1)
        for i in (0, 1):
            clients[i].cancel()
            await asyncio.sleep(0.1)
            assert queue.running == 1, "a waiting client was dropped"
        clients[2].cancel()
        await until_no_jobs(backend)

    served(test)


def test_an_evicted_grammar_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request contains the compiled grammar, so the engine does not read the cache."""
    compiled: list[str] = []
    build = matcher.build_matcher

    def counted(tokenizer: Any, grammar: Grammar, *limits: Any) -> Any:
        compiled.append(threading.current_thread().name)
        return build(tokenizer, grammar, *limits)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        monkeypatch.setattr(GrammarCompiler, "cached", lambda self, grammar: None)
        monkeypatch.setattr("peagle.grammar.compiler.build_matcher", counted)
        for i in (2, 3):
            assert await content(client, guided_regex=f"a{{{i}}}") == "a" * i
        assert len(compiled) == 2 and all("peagle-grammar" in name for name in compiled)

    served(test)


def test_grammars_wait_while_too_much_memory_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.server.front.grammar_queue.MAX_GRAMMAR_BYTES", 0)
    large = [f"{i:030d}" for i in range(3000)]

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        error = (await ask(client, code=429, guided_choice=large))["error"]
        assert "memory" in error["message"]

    served(test)


def test_a_burst_of_grammars_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many grammars as requests are accepted, but one user cannot occupy the whole queue."""
    monkeypatch.setattr("peagle.server.front.grammar_queue.WAIT_SECONDS", 120.0)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        asked = [content(client, guided_choice=[f"a{i}", f"b{i}"]) for i in range(70)]
        answers = await asyncio.gather(*asked)
        assert all(answer in (f"a{i}", f"b{i}") for i, answer in enumerate(answers))
        queue = backend.engines.grammar_queue
        queue.max_waiting = 4
        bombs = [asyncio.create_task(post_bomb(client, i)) for i in range(6)]
        await until(lambda: queue.waiting == 2)
        assert await content(client, guided_regex="ab{3}", user="b") == "abbb"
        for bomb in bombs:
            bomb.cancel()
        await until_no_jobs(backend)

    served(test, max_queue=200)

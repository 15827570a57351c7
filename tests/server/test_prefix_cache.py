"""Conversations in the prefix cache, and the cached tokens that a response reports."""

import logging
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import pytest

from benchmarks.server import agent_conversation
from benchmarks.server.agent_conversation import HttpServer
from peagle.catalog import DEFAULT_PAIR
from peagle.catalog.pair import DrafterSource, Pair, TargetSource
from peagle.engine.config import EngineConfig
from peagle.loaded import LoadedPair, load
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import TokenUsage
from peagle.target import Target
from tests.support.engine.engines import word_tokenizer
from tests.support.server.serving import CHAT, TEXT, ask, make_backend, running, served, tiny_pair

# two full pages of 64 tokens, and a partial one
LONG = " ".join(f"w{6 + i % 60}" for i in range(140))


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_reports_cached_tokens(path: str) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        assert cached_tokens(await ask(client, path, words=LONG)) == 0
        assert cached_tokens(await ask(client, path, words=LONG)) == 128
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await ask(client, path, words=LONG, stream=True, stream_options=options)
        assert {cached_tokens(chunk) for chunk in chunks} == {128}

    served(test)


def test_choices_report_only_tokens_cached_before_the_request() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        several = {"words": LONG, "n": 4, "temperature": 1, "seed": 1}
        assert cached_tokens(await ask(client, TEXT, **several)) == 0
        assert cached_tokens(await ask(client, TEXT, **several)) == 128
        both = await ask(client, TEXT, prompt=[LONG, LONG[::-1].replace("w", "") + " w7", LONG])
        assert cached_tokens(both) == 256

    served(test)


def test_usage_of_choices_that_have_not_begun() -> None:
    first = [1] * 10
    second = [2] * 20
    timing = RequestTiming(0.0)
    choices = [
        Choice(first, timing, tokens=2, cached_tokens=8),
        Choice(first, timing, tokens=1, cached_tokens=4),
        Choice(first, timing),  # The request waits in the queue.
        Choice(second, timing),
    ]
    assert TokenUsage.of(choices) == TokenUsage(30, 3, 4)


def test_log_line_has_the_cached_tokens(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for _ in range(2):
            await ask(client, words=LONG)

    with caplog.at_level(logging.INFO, "peagle.server"):
        served(test)
    lines = [record.__dict__["fields"] for record in caplog.records if record.msg == "request"]
    assert [line["cached_tokens"] for line in lines] == [0, 128]
    assert all(line["prompt_tokens"] > 140 and line["completion_tokens"] == 8 for line in lines)


TURNS = 10
PAGE = 8
SYSTEM = " ".join(f"w{20 + i * 7 % 70}" for i in range(70))


def reversible_pair() -> LoadedPair:
    """The tiny pair, with a tokenizer that maps the words of an answer back to the same tokens."""
    target = Target(tiny_pair().target.model, word_tokenizer(), "tiny")
    target.tokenizer.chat_template = (
        "{% for m in messages %}w90 {{ m['content'] }} w91 {% endfor %}w90"
    )
    pair = Pair("tiny", TargetSource(order=("folder",)), {"p-eagle": DrafterSource()})
    return LoadedPair(pair, target, {"p-eagle": tiny_pair().drafter("p-eagle")})


def converse(prefix_caching: bool, **fields: Any) -> list[dict[str, Any]]:
    """The responses of a conversation with alternating answers and tool results."""
    responses: list[dict[str, Any]] = []

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "w30 w31"}]
        for turn in range(TURNS):
            response = await ask(client, messages=messages, max_tokens=5 + turn % 3, **fields)
            responses.append(response)
            messages.append({"role": "assistant", "content": answer_text(response)})
            result = " ".join(f"w{20 + (turn + i * i) % 70}" for i in range(2 + turn % 4))
            messages.append({"role": "tool", "content": result})

    served(test, reversible_pair, prefix_caching=prefix_caching)
    return responses


def answer_text(response: dict[str, Any]) -> str:
    return response["choices"][0]["message"]["content"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "T=1"])
def test_only_new_tokens_of_a_conversation_are_prefilled(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """In ten turns, answers and accepted drafts equal those of a server without a prefix cache."""
    monkeypatch.setattr("peagle.engine.EngineConfig", partial(EngineConfig, page_size=PAGE))
    fields = {"ignore_eos": True, **sampling}
    cached, fresh = (converse(caching, **fields) for caching in (True, False))
    for ours, theirs in zip(cached, fresh, strict=True):
        assert answer_text(ours) == answer_text(theirs)
        assert ours["metrics"] == theirs["metrics"]
        assert cached_tokens(theirs) == 0
    for before, after in pairwise(cached):
        # all full pages of the previous turn including its answer, without the newest token
        known = before["usage"]["total_tokens"] - 1
        assert cached_tokens(after) == known // PAGE * PAGE
    prompt_tokens = sum(response["usage"]["prompt_tokens"] for response in cached)
    assert sum(map(cached_tokens, cached)) >= 0.8 * prompt_tokens


@pytest.mark.slow
def test_ten_turns_of_an_agent_on_the_default_pair() -> None:
    """At least 85 % of all prompt tokens come from the cache of a new server."""
    with running(make_backend(load, pair=DEFAULT_PAIR, k="auto", kv_tokens=8192)) as (_, url):
        turns = list(agent_conversation.converse(HttpServer(url), TURNS))
    assert len(turns) == TURNS and turns[0].cached_tokens == 0
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    assert sum(turn.cached_tokens for turn in turns) >= 0.85 * prompt_tokens

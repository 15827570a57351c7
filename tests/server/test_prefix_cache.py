"""Conversations in the prefix cache, and the cached tokens that a response reports."""

import logging
from typing import Any

import httpx
import pytest

from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import TokenUsage
from tests.support.serving import CHAT, TEXT, ask, served

LONG = " ".join(f"w{6 + i % 60}" for i in range(140))  # Two full pages of 64, and a rest.


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


def test_choices_of_one_prompt_report_what_was_known_before() -> None:
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
        Choice(first, timing),  # It waits in the queue.
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

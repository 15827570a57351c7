"""The engines of a server: selection for a request, their number, their counters."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from peagle.errors import UserError
from peagle.server.engines import extra_engines
from peagle.server.engines.method_choice import choose_method
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.generation_params import GenerationParams
from peagle.server.front.remote_slot import RemoteSlot
from peagle.server.http.errors import ApiError
from peagle.server.messages import EngineInfo, EngineKey
from peagle.server.openai import submit
from tests.support.server.serving import (
    SETTINGS,
    TEXT,
    ask,
    served,
    thread_engines,
    tiny_pair,
    until,
)


def test_methods_agree_and_can_be_traced() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        plain = (await ask(client))["choices"]
        for choice in (
            {"method": "none"},
            {"method": "eagle3"},
            {"method": "eagle3", "k": 2},
            {"k": "auto"},
        ):
            assert (await ask(client, peagle=choice))["choices"] == plain
        chunks = await ask(client, stream=True, peagle={"trace": True})
        traced = [chunk["peagle"] for chunk in chunks if "peagle" in chunk]
        assert sum(step["tokens"] for step in traced) == 8
        assert all(step["k"] == 3 for step in traced)
        assert all(0 <= step["accepted"] <= step["tokens"] for step in traced)
        texts = [text for step in traced for text in step["texts"]]
        assert texts == plain[0]["message"]["content"].split()
        status = (await client.get("/v1/peagle/status")).json()
        assert status["method"] == "p-eagle" and status["k"] == 3 and status["state"] == "ready"
        assert set(status["methods"]) == {"none", "ngram", "eagle3", "p-eagle"}
        assert set(status["engines"]) == {
            "p-eagle",
            "none",
            "eagle3",
            "eagle3 k=2",
            "p-eagle k=auto",
        }
        assert status["engines"]["p-eagle"]["accepted_per_position"]
        error = await ask(client, code=400, peagle={"method": "eagle"})
        assert "eagle3" in error["error"]["message"]

    served(test)


def test_only_the_main_engine_drafts_trees() -> None:
    """A request with its own method or K is drafted with chains."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        plain = (await ask(client, peagle={"method": "none"}))["choices"]
        for choice in ({}, {"method": "eagle3"}, {"k": 2}, {"k": 20}):
            assert (await ask(client, peagle=choice))["choices"] == plain
        engines = backend.engines
        assert engines.main is not None and set(engines.main.engine.metrics.k_steps) == {12}
        assert all(slot.engine.max_shape.is_chain for slot in engines.extra.values())

    served(test, tree=12)


def test_trees_need_the_drafter_of_the_server() -> None:
    pair = tiny_pair().pair
    with pytest.raises(UserError, match="need a p-eagle drafter"):
        choose_method(replace(SETTINGS, method=None, tree=12), replace(pair, method="eagle3"))


def test_extra_engines_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_engines, "MIN_IDLE_SECONDS", 60.0)  # allows for a slow machine

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await ask(client, peagle={"k": 1})
        assert (await ask(client, code=503, peagle={"k": 2}))["error"][
            "type"
        ] == "service_unavailable_error"
        next(iter(backend.engines.extra.values())).last_used = 0
        await ask(client, peagle={"k": 2})
        assert list(backend.engines.extra) == [("p-eagle", 2)]
        counts = backend.engines.counts()
        assert counts["p-eagle k=1"]["generated_tokens"] == 8
        assert counts["p-eagle k=2"]["generated_tokens"] == 8

    served(test, max_extra=1)


def test_engine_stays_open_while_a_request_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    scoring_allowed = asyncio.Event()
    score_prompts = submit.score_prompts

    async def delayed_scoring(*args: Any) -> Any:
        await scoring_allowed.wait()
        return await score_prompts(*args)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        monkeypatch.setattr(submit, "score_prompts", delayed_scoring)
        waiting = asyncio.create_task(ask(client, TEXT, echo=True, logprobs=1, peagle={"k": 1}))
        await until(lambda: backend.engines.extra)
        monkeypatch.setattr(submit, "score_prompts", score_prompts)
        slot = backend.engines.extra["p-eagle", 1]
        slot.last_used = 0
        assert "busy" in (await ask(client, code=503, peagle={"k": 2}))["error"]["message"]
        scoring_allowed.set()
        assert (await waiting)["usage"]["completion_tokens"] == 8
        slot.last_used = 0
        await ask(client, peagle={"k": 2})
        assert slot.engine.closed and slot.preparing == 0
        (connection,) = backend.engines.pool.connections.values()
        assert connection.link is not None
        info = EngineInfo(slot.name, slot.engine.context, slot.engine.vocab_size)
        closed = RemoteSlot(EngineKey("p-eagle", 1), info, connection, connection.link)
        backend.engines.extra["p-eagle", 2].last_used = time.monotonic() + 60
        with pytest.raises(ApiError, match="busy"):
            await backend.engines.add(closed, [6], GenerationParams(max_tokens=1))
        backend.engines.extra["p-eagle", 2].last_used = 0
        stream, _ = await backend.engines.add(closed, [6], GenerationParams(max_tokens=1))
        await until(lambda: any(piece.reason for piece in stream.poll()))
        assert list(backend.engines.extra) == [("p-eagle", 1)]  # the engine was rebuilt

    served(test, max_extra=1)


def test_counters_never_go_down() -> None:
    """The counts of closed engines are included in the totals."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        pool = thread_engines(backend).engine_pool
        await ask(client, peagle={"k": 1})
        line = 'vllm:generation_tokens_total{engine="p-eagle k=1",model_name="tiny"} 8.0'
        assert line in (await client.get("/metrics")).text
        slot = pool.extra.slots[EngineKey("p-eagle", 1)]
        pool.driver.submit(lambda: pool.extra.remove(slot)).result()
        assert not pool.extra.slots and line in (await client.get("/metrics")).text

    served(test)

"""The engine pool: concurrent builds, freed memory after eviction, failures that end the pool."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import ref

import httpx
import pytest

from peagle.server.engines import driver, prompt_logprobs
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.messages import EngineKey
from tests.support.server.serving import TEXT, WORDS, ask, served, thread_engines, until

SCORED: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Prompts are scored only while this event is set; otherwise the jobs yield and wait."""
    may_score = threading.Event()
    real = prompt_logprobs.score_prompt

    def score_prompt(*args: Any) -> Any:
        while not may_score.is_set():
            time.sleep(0.001)
            yield
        return (yield from real(*args))

    monkeypatch.setattr(prompt_logprobs, "score_prompt", score_prompt)
    return may_score


def builds_of(backend: EngineBackend) -> Any:
    worker = thread_engines(backend).source.worker
    assert worker is not None
    return worker.calls.builds


# --- extra engines --------------------------------------------------------------------------------


def test_other_requests_are_answered_while_an_engine_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()
    builds: list[Any] = []

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        build = backend.engines.factory.build_extra

        def slow_build(key: Any) -> Any:
            builds.append(key)
            assert go.wait(120)
            return build(key)

        monkeypatch.setattr(backend.engines.factory, "build_extra", slow_build)
        expected = (await ask(client))["choices"]
        waiting = [asyncio.create_task(ask(client, peagle={"k": 1})) for _ in range(3)]
        await until(lambda: builds)
        waiting[0].cancel()  # The disconnect of a client does not stop the build for the others.
        answer = await asyncio.wait_for(ask(client), 60)
        assert answer["choices"] == expected
        assert (await client.get("/health")).status_code == 200
        other = asyncio.create_task(ask(client, peagle={"k": 2}))
        await until(lambda: len(builds_of(backend)) == 2)
        error = (await ask(client, code=503, peagle={"k": 4}))[
            "error"
        ]  # At most two builds run at the same time.
        assert "busy" in error["message"]
        go.set()
        for task in (*waiting[1:], other):
            assert (await task)["choices"] == expected
        assert builds == [("p-eagle", 1), ("p-eagle", 2)]
        with suppress(asyncio.CancelledError):
            await waiting[0]

    served(test, max_extra=2)


def test_failed_build_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        build = backend.engines.factory.build_extra
        monkeypatch.setattr(backend.engines.factory, "build_extra", lambda key: 1 / 0)
        await ask(client, code=500, peagle={"k": 1})
        monkeypatch.setattr(backend.engines.factory, "build_extra", build)
        assert (await ask(client, peagle={"k": 1}))["usage"]["completion_tokens"] == 8

    served(test)


def test_failed_build_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch, without_garbage_collection: None
) -> None:
    parts: list[ref[Any]] = []

    class Part:
        pass

    def build(key: EngineKey) -> None:
        half = Part()
        parts.append(ref(half))
        raise RuntimeError("no memory for the rest")

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        monkeypatch.setattr(backend.engines.factory, "build_extra", build)
        for k in (1, 2):
            await ask(client, code=500, peagle={"k": k})
        assert len(parts) == 2 and [part() for part in parts] == [None, None]

    served(test)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stream": True},
        {"n": 3},
        {"path": TEXT} | SCORED | {"max_tokens": 2},
        {"logit_bias": {"9000": 1}},
    ],
    ids=["whole", "streamed", "choices", "scored", "refused"],
)
def test_evicted_engine_is_freed_without_garbage_collection(
    how: dict[str, Any], without_garbage_collection: None
) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        engines = backend.engines
        await ask(client, code=400 if "logit_bias" in how else 200, peagle={"k": 1}, **how)
        stepper = engines.extra["p-eagle", 1].engine.loop.stepper
        memory = [ref(stepper.kv_cache), ref(stepper.verifier), ref(stepper.prefill)]
        engine = ref(engines.extra["p-eagle", 1].engine)
        engines.extra["p-eagle", 1].last_used = 0
        del stepper
        await ask(client, peagle={"k": 2})
        assert [reference() for reference in memory] == [None] * 3
        # The traceback of an error may be part of a reference cycle.
        assert "logit_bias" in how or engine() is None

    served(test, max_extra=1)


# --- scoring --------------------------------------------------------------------------------------


def test_scoring_jobs_count_towards_the_queue(scoring: threading.Event) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body = {"prompt": WORDS} | SCORED
        posts = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(30)]
        await until(lambda: sum(post.done() for post in posts) == 26)
        scoring.set()
        replies = await asyncio.gather(*posts)
        scoring.clear()
        codes = [reply.status_code for reply in replies]
        assert codes.count(200) == 4 and codes.count(429) == 26
        refused = [reply for reply in replies if reply.status_code == 429]
        assert {reply.headers["retry-after"] for reply in refused} == {"1"}
        assert any("the queue holds 4" in reply.text for reply in refused)
        # All prompts of a body are counted, but they do not count for generation requests.
        scored = asyncio.create_task(ask(client, TEXT, prompt=[WORDS] * 3, **SCORED))
        await until(lambda: backend.engines.driver.long_jobs == 3)
        page = (await client.get("/metrics")).text
        assert 'peagle:num_prompt_scorings{model_name="tiny"} 3.0' in page
        await ask(client, TEXT, code=429, prompt=[WORDS] * 2, **SCORED)
        await ask(client)
        scoring.set()
        await scored
        await until(lambda: backend.engines.driver.long_jobs == 0)

    served(test, max_queue=4)


def test_scoring_jobs_have_a_limit_of_kv_tokens(
    monkeypatch: pytest.MonkeyPatch, scoring: threading.Event
) -> None:
    """Jobs wait in order while the running ones have as many tokens as the limit allows."""
    monkeypatch.setattr(driver, "MAX_LONG_JOB_TOKENS", 250)
    monkeypatch.setattr(prompt_logprobs, "ROWS_PER_PART", 20)
    real = prompt_logprobs.score_part
    open_caches: dict[int, ref[Any]] = {}
    peaks: list[int] = []

    def score_part(target: Any, cache: Any, *args: Any) -> Any:
        open_caches[id(cache)] = ref(cache)
        result = real(target, cache, *args)
        caches = [cache for reference in open_caches.values() if (cache := reference())]
        peaks.append(sum(cache.length for cache in caches))
        return result

    monkeypatch.setattr(prompt_logprobs, "score_part", score_part)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        prompts = [[6 + i] * 100 for i in range(8)]
        scoring.set()
        alone = [await ask(client, TEXT, prompt=prompt, **SCORED) for prompt in prompts]
        assert max(peaks) <= 100
        scoring.clear()
        asked = [ask(client, TEXT, prompt=prompt, **SCORED) for prompt in prompts]
        tasks = [asyncio.create_task(each) for each in asked]
        await until(lambda: backend.engines.driver.long_jobs == 8)
        scoring.set()
        together = await asyncio.gather(*tasks)
        assert [a["choices"] for a in together] == [a["choices"] for a in alone]
        assert 100 < max(peaks) <= 250

    served(test)


# --- failures -------------------------------------------------------------------------------------


def lose_device(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nhints follow")


def test_a_failed_extra_engine_ends_only_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        pool = thread_engines(backend).engine_pool
        await ask(client, peagle={"k": 1})
        slot = pool.extra.slots[EngineKey("p-eagle", 1)]
        monkeypatch.setattr(slot.engine.loop, "_prefill", lambda *_: 1 / 0)
        reply = await ask(client, code=500, peagle={"k": 1})
        assert "the engine stopped" in reply["error"]["message"]
        assert not pool.extra.slots and pool.state == "ready"
        assert (await ask(client, peagle={"k": 1}))["usage"]["completion_tokens"] == 8

    served(test)


def test_a_failed_step_of_the_main_engine_ends_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        pool = thread_engines(backend).engine_pool
        assert pool.main is not None
        monkeypatch.setattr(pool.main.engine.loop, "_prefill", lambda *_: 1 / 0)
        waiting = [asyncio.create_task(ask(client, code=503))]
        await until(lambda: pool.state == "ended" and not backend.is_healthy)
        assert "started again" in (await client.get("/health")).json()["error"]["message"]
        waiting.append(asyncio.create_task(ask(client, code=503)))
        await until(lambda: backend.engines.pool.waiting == 2)
        # Until then, the requests wait for another process.
        backend.engines.fail("no other process")
        await asyncio.gather(*waiting)
        pool.main.engine.close()

    served(test)


@pytest.mark.parametrize("how", ["build", "score"])
def test_a_device_lost_by_a_job_ends_the_pool(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is lost while an engine is built or a prompt is scored, without a running step."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        pool = thread_engines(backend).engine_pool
        if how == "build":
            monkeypatch.setattr(pool.factory, "build", lose_device)
            reply = await ask(client, code=503, peagle={"k": 2})
        else:
            monkeypatch.setattr(prompt_logprobs, "score_part", lose_device)
            reply = await ask(client, TEXT, code=503, **SCORED)
        assert "CUDA" not in reply["error"]["message"]
        await until(lambda: pool.state == "ended" and not backend.is_healthy)

    served(test)

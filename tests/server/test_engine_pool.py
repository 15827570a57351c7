"""The pool of engines: built beside the others, freed when evicted, given up when hopeless."""

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

from peagle.server.engines import driver, restart_timer
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.engines.method_choice import EngineKey
from peagle.server.openai import prompt_logprobs
from tests.support.serving import TEXT, WORDS, ask, client_of, make_backend, running, served, until

SCORED: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# --- extra engines --------------------------------------------------------------------------------


def test_others_are_answered_while_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    builds: list[Any] = []

    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        build = backend.engines.factory.build_extra

        def slow_build(key: Any) -> Any:
            builds.append(key)
            assert go.wait(30)
            return build(key)

        monkeypatch.setattr(backend.engines.factory, "build_extra", slow_build)
        expected = (await ask(client))["choices"]
        waiting = [asyncio.create_task(ask(client, peagle={"k": 1})) for _ in range(3)]
        await until(lambda: builds)
        waiting[0].cancel()  # A client that leaves does not stop the build for the others.
        answer = await asyncio.wait_for(ask(client), 20)
        assert answer["choices"] == expected
        assert (await client.get("/health")).status_code == 200
        other = asyncio.create_task(ask(client, peagle={"k": 2}))
        await until(lambda: len(backend.engines._builds) == 2)
        error = (await ask(client, code=503, peagle={"k": 4}))["error"]  # Two builds at most.
        assert "busy" in error["message"]
        go.set()
        for task in (*waiting[1:], other):
            assert (await task)["choices"] == expected
        assert builds == [("p-eagle", 1), ("p-eagle", 2)]
        with suppress(asyncio.CancelledError):
            await waiting[0]

    served(test, max_extra=2)


def test_failed_build_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        build = backend.engines.factory.build_extra
        monkeypatch.setattr(backend.engines.factory, "build_extra", lambda key: 1 / 0)
        await ask(client, code=500, peagle={"k": 1})
        monkeypatch.setattr(backend.engines.factory, "build_extra", build)
        assert (await ask(client, peagle={"k": 1}))["usage"]["completion_tokens"] == 8

    served(test)


def test_failed_build_leaves_nothing_in_memory(
    monkeypatch: pytest.MonkeyPatch, no_collector: None
) -> None:
    parts: list[ref[Any]] = []

    class Part:
        pass

    def build(key: EngineKey) -> None:
        half = Part()
        parts.append(ref(half))
        raise RuntimeError("no memory for the rest")

    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
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
def test_evicted_engine_is_freed_without_the_collector(
    how: dict[str, Any], no_collector: None
) -> None:
    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        engines = backend.engines
        await ask(client, code=400 if "logit_bias" in how else 200, peagle={"k": 1}, **how)
        stepper = engines.extra["p-eagle", 1].engine.loop.stepper
        memory = [ref(stepper.kv_cache), ref(stepper.verifier), ref(stepper.prefill)]
        engine = ref(engines.extra["p-eagle", 1].engine)
        engines.extra["p-eagle", 1].last_used = 0
        del stepper
        await ask(client, peagle={"k": 2})
        assert [reference() for reference in memory] == [None] * 3
        assert "logit_bias" in how or engine() is None  # An error's traceback may be in a cycle.

    served(test, max_extra=1)


# --- scoring --------------------------------------------------------------------------------------


def test_scorings_count_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    real = prompt_logprobs.score_part
    monkeypatch.setattr(
        prompt_logprobs, "score_part", lambda *args: (time.sleep(0.05), real(*args))[1]
    )

    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        posts = [client.post(TEXT, json={"prompt": WORDS} | SCORED) for _ in range(30)]
        replies = await asyncio.gather(*posts)
        codes = [reply.status_code for reply in replies]
        assert codes.count(200) == 4 and codes.count(429) == 26
        refused = [reply for reply in replies if reply.status_code == 429]
        assert {reply.headers["retry-after"] for reply in refused} == {"1"}
        assert any("the queue holds 4" in reply.text for reply in refused)
        # All prompts of a body are counted, and a generation is not refused because of them.
        scored = asyncio.create_task(ask(client, TEXT, prompt=[WORDS] * 3, **SCORED))
        await until(lambda: backend.engines.scorings == 3)
        page = (await client.get("/metrics")).text
        assert 'peagle:num_prompt_scorings{model_name="tiny"} 3.0' in page
        await ask(client, TEXT, code=429, prompt=[WORDS] * 2, **SCORED)
        await ask(client)
        await scored
        assert backend.engines.scorings == 0 and backend.engines.driver.long_jobs == 0

    served(test, max_queue=4)


def test_scorings_hold_little_kv_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs wait, in their order, while those under way hold as many tokens as are allowed."""
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

    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        prompts = [[6 + i] * 100 for i in range(8)]
        alone = [await ask(client, TEXT, prompt=prompt, **SCORED) for prompt in prompts]
        assert max(peaks) <= 100
        together = await asyncio.gather(
            *(ask(client, TEXT, prompt=prompt, **SCORED) for prompt in prompts)
        )
        assert [a["choices"] for a in together] == [a["choices"] for a in alone]
        assert 100 < max(peaks) <= 250

    served(test)


# --- failures -------------------------------------------------------------------------------------


def kill(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.engines.main is not None
    monkeypatch.setattr(backend.engines.main.engine.loop, "_prefill", lambda *_: 1 / 0)


def test_restart_is_tried_again_if_memory_cannot_be_released(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        release = backend.engines.factory.release_memory
        calls: list[int] = []

        def fail_once() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("memory cannot be released now")
            release()

        monkeypatch.setattr(backend.engines.factory, "release_memory", fail_once)
        kill(backend, monkeypatch)
        await ask(client, code=503)
        await until(lambda: backend.is_healthy)
        assert len(calls) == 2 and "restart failed" in caplog.text
        assert (await ask(client))["usage"]["completion_tokens"] == 8

    served(test)


def test_server_gives_up_after_failures_in_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restart_timer, "MAX_FAILURES", 3)
    reasons: list[str] = []

    async def main() -> None:
        backend = make_backend(backoff=0.01)
        backend.engines.on_failure = reasons.append
        async with client_of(backend) as client:
            await ask(client)  # An engine that answered is no failure when it dies.
            monkeypatch.setattr(backend.engines.factory, "build_main", lambda: 1 / 0)
            kill(backend, monkeypatch)
            await ask(client, code=503)
            await until(lambda: reasons)
            assert backend.engines.state == "failed" and backend.engines.restarts == 3
            reply = await client.get("/health")
            assert reply.status_code == 503
            await asyncio.sleep(0.2)
            assert backend.engines.restarts == 3

    asyncio.run(main())
    assert len(reasons) == 1 and "3 times in a row" in reasons[0]
    assert caplog.text.count("restart failed") == 3 and "gave up" in caplog.text


def test_process_ends_after_failures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` raises the failure, so the exit code is not 0."""
    monkeypatch.setattr(restart_timer, "MAX_FAILURES", 2)
    backend = make_backend(backoff=0.01)
    with running(backend) as (server, url):
        monkeypatch.setattr(backend.engines.factory, "release_memory", lambda: 1 / 0)
        kill(backend, monkeypatch)
        reply = httpx.post(url + TEXT, json={"prompt": WORDS, "max_tokens": 4}, timeout=30)
        assert reply.status_code == 503
        end = time.monotonic() + 20
        while backend.engines.driver.alive:
            assert time.monotonic() < end, "the server still runs"
            time.sleep(0.05)
        assert server.failure is not None and "2 times in a row" in server.failure


def test_engines_that_die_before_they_answer_are_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart_timer, "MAX_FAILURES", 3)
    reasons: list[str] = []

    async def main() -> None:
        backend = make_backend(backoff=0.01)
        backend.engines.on_failure = reasons.append
        async with client_of(backend) as client:
            for restarts in range(3):
                await until(lambda count=restarts: backend.engines.restarts == count)
                await until(lambda: backend.is_healthy)
                kill(backend, monkeypatch)
                await ask(client, code=503)
            await until(lambda: reasons)
            assert backend.engines.restarts == 2

    asyncio.run(main())


def test_driver_that_crashes_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    async def main() -> None:
        backend = make_backend(timeout=2)
        backend.engines.on_failure = reasons.append
        async with client_of(backend) as client:
            monkeypatch.setattr(backend.engines.driver, "on_engine_failure", lambda *_: 1 / 0)
            kill(backend, monkeypatch)
            await ask(client, code=504)
            await until(lambda: reasons)
            assert not backend.is_healthy and backend.engines.state == "failed"

    asyncio.run(main())
    assert "ZeroDivisionError" in reasons[0]


def test_hung_step_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        assert backend.engines.main is not None
        loop = backend.engines.main.engine.loop
        run = loop.run
        monkeypatch.setattr(loop, "run", lambda: go.wait(30) and run())
        waiting = asyncio.create_task(ask(client))
        await until(lambda: not backend.is_healthy)
        reply = await client.get("/health")
        assert reply.status_code == 503 and "hangs" in reply.json()["error"]["message"]
        await ask(client, code=503)
        page = (await client.get("/metrics")).text
        assert 'peagle:engine_up{model_name="tiny"} 0.0' in page
        name = 'peagle:driver_heartbeat_age_seconds{model_name="tiny"} '
        age = next(line for line in page.splitlines() if line.startswith(name))
        assert float(age.removeprefix(name)) > 0.5
        assert (await client.get("/v1/peagle/status")).json()["heartbeat_age"] > 0.5
        go.set()
        assert (await waiting)["usage"]["completion_tokens"] == 8
        await until(lambda: backend.is_healthy)

    served(test, step_timeout=0.5)


def test_idle_driver_has_a_heartbeat() -> None:
    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        await asyncio.sleep(2 * driver.IDLE_SECONDS)
        assert backend.engines.heartbeat_age < 1.5 * driver.IDLE_SECONDS
        assert backend.is_healthy

    served(test)

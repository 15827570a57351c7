"""Requests that arrive while the engine process is replaced wait for the next process."""

import asyncio
import json
import signal
import time
from typing import Any

import httpx
import pytest

from peagle.server.front import engine_client
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.engine_client import EngineClient
from peagle.server.front.generation_params import GenerationParams
from peagle.server.messages import EngineState, ServerState
from tests.support.server.serving import (
    CHAT,
    HELLO,
    TEXT,
    ask,
    make_backend,
    raw_request,
    read_reply,
    running,
    served,
    until,
)
from tests.support.waiting import wait_for

BODIES: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"n": 3},
    {"peagle": {"k": 1}},
    {"path": TEXT, "echo": True, "logprobs": 2},
]


def set_running(engines: EngineClient, is_running: bool) -> None:
    """Report the end of the process, or the start of the next one, like the supervisor."""
    address = engines.pool.connections["engine"].state.address
    engines.pool.update(ServerState([EngineState("engine", address, is_running)]))


def test_waiting_requests_are_answered_by_the_next_process() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        engines = backend.engines
        set_running(engines, False)
        asked = [asyncio.create_task(ask(client, **body)) for body in BODIES]
        # One body asks for three choices.
        await until(lambda: engines.pool.waiting == len(BODIES) + 2)
        assert not backend.is_healthy and (await client.get("/health")).status_code == 503
        for path, body in (("/tokenize", {"prompt": "w6"}), ("/detokenize", {"tokens": [6]})):
            reply = await client.post(path, json=body)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "2"
        refused = await ask(client, code=400, max_tokens=100_000, peagle={"k": 99})
        assert refused["error"]["type"] == "invalid_request_error"  # without waiting
        await asyncio.sleep(0.2)
        set_running(engines, True)
        await asyncio.gather(*asked)
        assert engines.pool.waiting == 0
        page = (await client.get("/metrics")).text
        assert first_token_seconds(page) > 0.2, "the waiting time counts as latency"

    served(test)


def first_token_seconds(page: str) -> float:
    lines = [line for line in page.splitlines() if "time_to_first_token_seconds_sum" in line]
    return max(float(line.split()[-1]) for line in lines)


def test_waiting_requests_are_limited_by_the_queue() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        engines = backend.engines
        set_running(engines, False)
        waiting = [asyncio.create_task(ask(client)) for _ in range(2)]
        await until(lambda: engines.pool.waiting == 2)
        error = (await ask(client, code=429, n=2))["error"]
        words = "3 requests are already waiting: try again later, or raise `max_queue`"
        assert error["message"] == words and error["type"] == "rate_limit_error"
        waiting.append(asyncio.create_task(ask(client)))
        await until(lambda: engines.pool.waiting == 3)
        full = await client.post(CHAT, json={"messages": HELLO})
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        set_running(engines, True)
        for reply in await asyncio.gather(*waiting):  # more than a batch, and none is refused
            assert reply["usage"]["completion_tokens"] == 8

    served(test, max_batch=1, max_queue=3)


@pytest.mark.parametrize("end", ["failed", "closed"])
def test_waiting_requests_fail_without_a_next_process(end: str) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        engines = backend.engines
        set_running(engines, False)
        waiting = asyncio.create_task(ask(client, code=503))
        await until(lambda: engines.pool.waiting == 1)
        if end == "failed":
            engines.fail("five processes in a row")
        else:
            await engines.close()
        message = (await waiting)["error"]["message"]
        assert ("could not be loaded" if end == "failed" else "shutting down") in message
        await ask(client, code=503)

    served(test)


@pytest.mark.parametrize("limit", ["of the server", "of the request"])
def test_the_waiting_time_is_limited(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {}
    if limit == "of the server":
        monkeypatch.setattr(engine_client, "RESTART_WAIT_SECONDS", 0.3)
    else:
        changes = {"timeout": 0.3}

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        set_running(backend.engines, False)
        started = time.monotonic()
        reply = await client.post(CHAT, json={"messages": HELLO})
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2"
        assert "started again" in reply.json()["error"]["message"]
        assert 0.3 <= time.monotonic() - started < 60 and backend.engines.pool.waiting == 0

    served(test, **changes)


def test_a_process_that_ends_while_a_request_is_prepared() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        engines = backend.engines
        async with engines.slot(engines.key) as slot:
            set_running(engines, False)
            work = [engines.score(slot, [6, 9], 1), engines.add(slot, [6], GenerationParams(4))]
            tasks = [asyncio.ensure_future(part) for part in work]
            await until(lambda: engines.pool.waiting == 2)
            set_running(engines, True)
            scores, (stream, _) = await asyncio.gather(*tasks)
            assert len(scores) == 1 and not slot.closed
        await until(lambda: not slot.connection.requests)
        assert sum(len(piece.step.tokens) for piece in stream.poll() if piece.step) == 4

    served(test)


def test_waiting_requests_end_with_a_disconnect_or_shutdown() -> None:
    backend = make_backend(drain_seconds=60)
    body = json.dumps({"messages": HELLO}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\nhost: 127.0.0.1\ncontent-type: application/json\n"
        f"content-length: {len(body)}"
    )
    pool = backend.engines.pool
    with running(backend) as (server, url):
        assert server.loop is not None
        server.loop.call_soon_threadsafe(set_running, backend.engines, False)
        wait_for(lambda: not backend.is_healthy)
        connections = [raw_request(url, head, body) for _ in range(2)]
        wait_for(lambda: pool.waiting == 2)
        connections.pop().close()
        wait_for(lambda: pool.waiting == 1)
        server.handle_exit(signal.SIGTERM, None)
        status, reply = read_reply(connections[0])  # long before the end of the drain
        assert status == 503 and b"shutting down" in reply
        wait_for(lambda: server.should_exit)
        connections[0].close()

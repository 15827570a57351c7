"""Requests that make a server build engines, or score prompts: memory stays flat, others go on."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer, live_server
from tests.support.serving import CHAT, HELLO, TEXT

pytestmark = pytest.mark.abuse

REQUESTS = 100
MAX_GROWTH_MB = 40.0  # One extra engine of this server has 8 MB of KV cache; leaks add up.


def ask_with_k(server: LiveServer, k: int, **more: Any) -> None:
    """Ask for this K; 503 means that the engines beside the server's own are in use."""
    body = {"messages": HELLO, "max_tokens": 4, "peagle": {"k": k}} | more
    for _ in range(100):
        reply = httpx.post(server.url + CHAT, json=body, timeout=60)
        if reply.status_code != 503:
            assert reply.status_code == 200, reply.text
            return
        time.sleep(0.1)
    raise AssertionError(reply.text)


def test_memory_is_flat_after_many_k(folder: Path) -> None:
    options = ("--max-batch", "64", "--kv-tokens", "65536")
    with live_server(folder, *options) as server:
        for k in range(1, 13):  # The pools of the allocator fill up first.
            ask_with_k(server, k)
        before = server.rss_mb()
        for i in range(REQUESTS):
            ask_with_k(server, 1 + i % 30, stream=bool(i % 2))
        growth = server.rss_mb() - before
        status = httpx.get(f"{server.url}/v1/peagle/status").json()
        assert len(status["engines"]) == 5  # The server's own and four others.
        assert growth < MAX_GROWTH_MB, f"{growth:.0f} MB after {REQUESTS} requests"


def test_streams_and_health_go_on_while_engines_are_built(server: LiveServer) -> None:
    """An answer that is being streamed has no pause while engines are built for others."""
    body = {"prompt": "w6", "max_tokens": 200, "ignore_eos": True, "stream": True}
    stop = threading.Event()
    gaps: list[float] = []

    def stream() -> None:
        while not stop.is_set():
            with httpx.stream("POST", server.url + TEXT, json=body, timeout=60) as reply:
                last = time.perf_counter()
                for line in reply.iter_lines():
                    if line:
                        now = time.perf_counter()
                        gaps.append(now - last)
                        last = now

    reader = threading.Thread(target=stream)
    reader.start()
    try:
        builder = threading.Thread(target=lambda: [ask_with_k(server, k) for k in range(1, 9)])
        builder.start()
        slowest = 0.0
        while builder.is_alive():
            slowest = max(slowest, server.slowest_health(0.2))
    finally:
        stop.set()
        reader.join()
    assert slowest < 2.0 and max(gaps) < 2.0, (slowest, max(gaps))
    assert len(gaps) > 200


def test_scoring_flood_is_refused(folder: Path) -> None:
    async def flood(url: str) -> list[httpx.Response]:
        body = {"prompt": [7] * 200, "max_tokens": 0, "echo": True, "logprobs": 5}
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(300)))

    with live_server(folder, "--max-queue", "4", "--max-batch", "8") as server:
        replies = asyncio.run(flood(server.url))
        codes = [reply.status_code for reply in replies]
        assert set(codes) == {200, 429}, set(codes)
        assert codes.count(429) > 150
        assert all(reply.headers["retry-after"] for reply in replies if reply.status_code == 429)
        assert server.health_seconds() < 2.0
        status = httpx.get(f"{server.url}/v1/peagle/status").json()
        assert status["scorings"] == 0

"""Two replicas under load, one of them killed with -9: what was lost, and was it on the killed one?

python -m tests.measure_scale replicas
python -m tests.measure_scale data-parallel --python .venv-vllm/bin/python
python -m tests.measure_scale ray --python RAY/bin/python         # Ray and vLLM in one environment
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.scaling import PAIR, ROADS
from benchmarks.serve import WORDS

SETTLE, AGAIN = 10.0, 20.0  # seconds of load before the kill; and after both serve again


@dataclass
class Request:
    id: str
    stream: bool
    began: float
    ended: float = 0.0
    error: str | None = None
    tokens: int = 0


class Load:
    """Users who ask again as soon as they are answered, every other request a stream."""

    def __init__(self, url: str, users: int, tokens: int) -> None:
        self.url, self.users, self.tokens = url, users, tokens
        self.requests: list[Request] = []
        self.over = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(self.user(client, i) for i in range(self.users)))

    async def user(self, client: httpx.AsyncClient, user: int) -> None:
        turn = 0
        while not self.over:
            stream = (
                user // 2 + turn
            ) % 2 == 0  # neighbors go to different replicas: each gets both kinds
            request = Request(f"scale-{user}-{turn}-{os.getpid()}", stream, time.monotonic())
            self.requests.append(request)
            try:
                await self.ask(client, request, WORDS[(user + turn) % len(WORDS)])
            except (httpx.HTTPError, RuntimeError) as error:
                request.error = f"{type(error).__name__}: {error}"[:120]
                await asyncio.sleep(0.2)
            request.ended = time.monotonic()
            turn += 1

    async def ask(self, client: httpx.AsyncClient, request: Request, words: str) -> None:
        body = {
            "model": PAIR,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": request.stream,
        }
        body |= {"stream_options": {"include_usage": True}} if request.stream else {}
        headers = {"x-request-id": request.id}
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as reply:
            text = "".join([piece async for piece in reply.aiter_text()])
        if reply.status_code != 200:
            raise RuntimeError(f"HTTP {reply.status_code}")
        request.tokens = (
            usage(text) if request.stream else json.loads(text)["usage"]["completion_tokens"]
        )
        if request.tokens != self.tokens:
            reasons = re.findall(r'"finish_reason":"(\w+)', text)
            raise RuntimeError(f"200, but cut short, finish_reason {reasons[-1:]}")


def usage(text: str) -> int:
    """Of a stream that came to its end."""
    events = [
        line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")
    ]
    if not events or events[-1].strip() != "[DONE]":
        raise RuntimeError("the stream broke off")
    told = [json.loads(event) for event in events[:-1]]
    if error := next((event["error"] for event in told if "error" in event), None):
        raise RuntimeError(
            f"told in the stream: {error.get('message') if isinstance(error, dict) else error}"
        )
    return next(
        event["usage"]["completion_tokens"] for event in reversed(told) if event.get("usage")
    )


async def measure(road: str, python: str, users: int, tokens: int) -> dict[str, Any]:
    deployment = ROADS[road](python)
    started = time.monotonic()
    with deployment.running() as url:
        up = time.monotonic() - started
        load = Load(url, users, tokens)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(SETTLE)
        before = await asyncio.to_thread(deployment.ready)
        victim = min(before)
        counted = await asyncio.to_thread(deployment.held, victim, set())
        killed = time.monotonic()
        for pid in before[victim]:
            os.kill(pid, signal.SIGKILL)
        back = await until_back(deployment, before[victim], killed)
        await asyncio.sleep(AGAIN)
        load.over = True
        await running
        under_way = {r.id for r in load.requests if r.began < killed < r.ended}
        held = counted if isinstance(counted, int) else deployment.held(victim, under_way)
    return {"road": road, "users": users, "tokens": tokens, "start_s": round(up, 1)} | told(
        load, killed, back, held
    )


async def until_back(deployment: Any, old: list[int], killed: float) -> float:
    """Seconds until two replicas serve, none of them in the processes that were killed."""
    while True:
        await asyncio.sleep(0.25)
        try:
            ready = await asyncio.to_thread(deployment.ready)
        except (httpx.HTTPError, LookupError):
            continue
        if len(ready) == 2 and not {pid for family in ready.values() for pid in family} & set(old):
            return time.monotonic() - killed


def told(load: Load, killed: float, back: float, held: "set[str] | int") -> dict[str, Any]:
    done = load.requests
    failed = [r for r in done if r.error]
    under_way = [r for r in done if r.began < killed < r.ended]
    lost = [r for r in under_way if r.error]
    later = [r for r in failed if r.began >= killed]
    answered = sorted(r.ended for r in done if not r.error and r.ended > killed)
    gaps = [b - a for a, b in zip([killed, *answered], answered, strict=False)]
    elsewhere = (
        len(lost) - held if isinstance(held, int) else len([r for r in lost if r.id not in held])
    )
    return {
        "requests": len(done),
        "streams": sum(r.stream for r in done),
        "answered": len(done) - len(failed),
        "in_flight_at_kill": len(under_way),
        "on_the_killed": held if isinstance(held, int) else len(held),
        "lost_streams": sum(r.stream for r in lost),
        "lost_whole": sum(not r.stream for r in lost),
        "lost_beyond_those_on_it": max(0, elsewhere),
        "failed_before": len([r for r in failed if r.ended <= killed]),
        "failed_after": len(later),
        "told_within_s": round(max((r.ended - killed for r in lost), default=0.0), 1),
        "longest_gap_s": round(max(gaps, default=0.0), 1),
        "both_again_s": round(back, 1),
        "seconds_per_request": round(
            statistics.median(r.ended - r.began for r in done if not r.error), 2
        ),
        "errors": dict(Counter(r.error for r in failed)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("road", choices=list(ROADS))
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that has vLLM, or Ray and vLLM"
    )
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    print(json.dumps(asyncio.run(measure(**vars(parser.parse_args()))), indent=1))

"""Kill one of two replicas under load (SIGKILL): which requests are lost, and were they on it?

python -m benchmarks.server.scale replicas
python -m benchmarks.server.scale data-parallel --python .venv-vllm/bin/python
python -m benchmarks.server.scale ray --python RAY/bin/python      # Ray and vLLM in one environment
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

from benchmarks.server.deployments import DEPLOYMENTS, PAIR, Deployment
from benchmarks.server.load import PROMPTS

SECONDS_BEFORE_KILL = 10.0
SECONDS_AFTER_RECOVERY = 20.0


@dataclass
class Request:
    id: str
    stream: bool
    began: float
    ended: float = 0.0
    error: str | None = None
    tokens: int = 0


class Load:
    """Users who send the next request after each answer; every other request is a stream."""

    def __init__(self, url: str, users: int, tokens: int) -> None:
        self.url = url
        self.users = users
        self.tokens = tokens
        self.requests: list[Request] = []
        self.over = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(self.user(client, i) for i in range(self.users)))

    async def user(self, client: httpx.AsyncClient, user: int) -> None:
        turn = 0
        while not self.over:
            # Neighbors go to different replicas, so each replica gets both kinds.
            stream = (user // 2 + turn) % 2 == 0
            request = Request(f"scale-{user}-{turn}-{os.getpid()}", stream, time.monotonic())
            self.requests.append(request)
            try:
                await self.ask(client, request, PROMPTS[(user + turn) % len(PROMPTS)])
            except (httpx.HTTPError, RuntimeError) as error:
                request.error = f"{type(error).__name__}: {error}"[:120]
                await asyncio.sleep(0.2)
            request.ended = time.monotonic()
            turn += 1

    async def ask(self, client: httpx.AsyncClient, request: Request, prompt: str) -> None:
        body = {
            "model": PAIR,
            "messages": [{"role": "user", "content": prompt}],
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
            stream_tokens(text)
            if request.stream
            else json.loads(text)["usage"]["completion_tokens"]
        )
        if request.tokens != self.tokens:
            reasons = re.findall(r'"finish_reason":"(\w+)', text)
            raise RuntimeError(f"200, but cut short, finish_reason {reasons[-1:]}")


def stream_tokens(text: str) -> int:
    """The number of tokens of a stream, which must be complete."""
    events = [
        line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")
    ]
    if not events or events[-1].strip() != "[DONE]":
        raise RuntimeError("the stream broke off")
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    if error := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        message = error.get("message") if isinstance(error, dict) else error
        raise RuntimeError(f"error in the stream: {message}")
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return int(usage["completion_tokens"])


async def measure(road: str, python: str, users: int, tokens: int) -> dict[str, Any]:
    deployment = DEPLOYMENTS[road](python)
    started = time.monotonic()
    with deployment.running() as url:
        start_seconds = time.monotonic() - started
        load = Load(url, users, tokens)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(SECONDS_BEFORE_KILL)
        before = await asyncio.to_thread(deployment.ready)
        victim = min(before)
        counted = await asyncio.to_thread(deployment.requests_on, victim, set())
        killed = time.monotonic()
        for pid in before[victim]:
            os.kill(pid, signal.SIGKILL)
        recovery = await recovery_seconds(deployment, before[victim], killed)
        await asyncio.sleep(SECONDS_AFTER_RECOVERY)
        load.over = True
        await running
        in_flight = {r.id for r in load.requests if r.began < killed < r.ended}
        on_victim = counted
        if not isinstance(counted, int):
            on_victim = deployment.requests_on(victim, in_flight)
    settings = {"road": road, "users": users, "tokens": tokens, "start_s": round(start_seconds, 1)}
    return settings | summarize(load, killed, recovery, on_victim)


async def recovery_seconds(deployment: Deployment, old: list[int], killed: float) -> float:
    """Seconds until two replicas serve, none of them in the processes that were killed."""
    while True:
        await asyncio.sleep(0.25)
        try:
            ready = await asyncio.to_thread(deployment.ready)
        except (httpx.HTTPError, LookupError):
            continue
        if len(ready) == 2 and not {pid for family in ready.values() for pid in family} & set(old):
            return time.monotonic() - killed


def summarize(
    load: Load, killed: float, recovery: float, on_victim: set[str] | int
) -> dict[str, Any]:
    """`on_victim`: the requests in flight on the killed replica, or their number."""
    done = load.requests
    failed = [r for r in done if r.error]
    in_flight = [r for r in done if r.began < killed < r.ended]
    lost = [r for r in in_flight if r.error]
    later = [r for r in failed if r.began >= killed]
    answered = sorted(r.ended for r in done if not r.error and r.ended > killed)
    gaps = [b - a for a, b in zip([killed, *answered], answered, strict=False)]
    if isinstance(on_victim, int):
        num_on_victim = on_victim
        lost_elsewhere = len(lost) - on_victim
    else:
        num_on_victim = len(on_victim)
        lost_elsewhere = len([r for r in lost if r.id not in on_victim])
    return {
        "requests": len(done),
        "streams": sum(r.stream for r in done),
        "answered": len(done) - len(failed),
        "in_flight_at_kill": len(in_flight),
        "on_the_killed": num_on_victim,
        "lost_streams": sum(r.stream for r in lost),
        "lost_whole": sum(not r.stream for r in lost),
        "lost_beyond_those_on_it": max(0, lost_elsewhere),
        "failed_before": len([r for r in failed if r.ended <= killed]),
        "failed_after": len(later),
        "told_within_s": round(max((r.ended - killed for r in lost), default=0.0), 1),
        "longest_gap_s": round(max(gaps, default=0.0), 1),
        "both_again_s": round(recovery, 1),
        "seconds_per_request": round(
            statistics.median(r.ended - r.began for r in done if not r.error), 2
        ),
        "errors": dict(Counter(r.error for r in failed)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("road", choices=list(DEPLOYMENTS))
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has vLLM, or Ray and vLLM"
    )
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    print(json.dumps(asyncio.run(measure(**vars(parser.parse_args()))), indent=1))

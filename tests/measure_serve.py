"""Many streams for a while against `peagle serve`: errors, p99 of the time to the first token, memory, pages.

python -m tests.measure_serve http://127.0.0.1:8000 --streams 200 --seconds 300 --pid PID
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

WORDS = [
    "Write a function that adds two numbers.",
    "Why is the sky blue?",
    "Tell me a story about rain.",
    "What is 12 * 7?",
]


class Load:
    def __init__(self, client: httpx.AsyncClient, tokens: int) -> None:
        self.client, self.tokens = client, tokens
        self.first: list[float] = []
        self.whole: list[float] = []
        self.errors: dict[str, int] = {}
        self.said = 0

    async def user(self, number: int, end: float) -> None:
        chance = random.Random(number)
        while time.perf_counter() < end:
            try:
                await self.ask(chance)
            except Exception as error:
                name = f"{type(error).__name__}: {error}"[:80]
                self.errors[name] = self.errors.get(name, 0) + 1
                await asyncio.sleep(0.2)

    async def ask(self, chance: random.Random) -> None:
        body = {
            "messages": [{"role": "user", "content": chance.choice(WORDS)}], "stream": True,
            "seed": chance.randrange(99),
            "max_tokens": chance.randint(self.tokens // 2, self.tokens), "temperature": chance.choice([0, 0.8]),
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        started, first, usage = time.perf_counter(), None, None
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"HTTP {reply.status_code}")
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - started
                usage = event.get("usage") or usage
        assert usage is not None, "no usage"
        self.said += usage["completion_tokens"]
        self.first += [first] if first is not None else []
        self.whole.append(time.perf_counter() - started)


def rss(pid: int | None) -> float | None:
    """MB."""
    if pid is None:
        return None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def main(url: str, streams: int, seconds: float, tokens: int, pid: int | None) -> None:
    limits, memory = httpx.Limits(max_connections=None), list[float | None]()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        load, started = Load(client, tokens), time.perf_counter()
        users = [asyncio.create_task(load.user(i, started + seconds)) for i in range(streams)]
        while not all(user.done() for user in users):
            await asyncio.sleep(min(10, seconds / 4))
            memory.append(rss(pid))
        spent = time.perf_counter() - started
        status = (await client.get("/v1/peagle/status")).json()["engines"]
    cuts = statistics.quantiles(load.first, n=100) if len(load.first) > 1 else [0.0] * 99
    print(json.dumps({
        "streams": streams, "seconds": round(spent, 1), "answers": len(load.whole), "errors": load.errors,
        "tokens_per_second": round(load.said / spent, 1), "ttft_p50": round(cuts[49], 3),
        "ttft_p99": round(cuts[98], 3),
        "rss_mb": [None if m is None else round(m) for m in memory],
        "kv_usage_after": {name: one["kv_usage"] for name, one in status.items()},
        "acceptance_length": {name: one["acceptance_length"] for name, one in status.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pid", type=int)
    asyncio.run(main(**vars(parser.parse_args())))

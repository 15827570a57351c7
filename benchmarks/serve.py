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
from urllib.parse import urlsplit

import httpx

WORDS = [
    "Write a function that adds two numbers.",
    "Why is the sky blue?",
    "Tell me a story about rain.",
    "What is 12 * 7?",
]


class Load:
    """Plain sockets: a client that parses every chunk would be slower than the server."""

    def __init__(self, url: str, tokens: int) -> None:
        self.url, self.tokens = urlsplit(url), tokens
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
            "messages": [{"role": "user", "content": chance.choice(WORDS)}],
            "stream": True,
            "seed": chance.randrange(99),
            "max_tokens": chance.randint(self.tokens // 2, self.tokens),
            "temperature": chance.choice([0, 0.8]),
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.url.netloc}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(
            self.url.hostname, self.url.port, limit=1 << 20
        )
        try:
            writer.write(head.encode() + data)
            first, usage = await self.read(reader)
        finally:
            writer.close()
        self.first.append(first - started)
        self.whole.append(time.perf_counter() - started)
        self.said += usage["completion_tokens"]

    async def read(self, reader: asyncio.StreamReader) -> tuple[float, dict[str, int]]:
        """When the first token was there, and the usage."""
        status = (await reader.readline()).split()[1]
        if status != b"200":
            raise RuntimeError(f"HTTP {status.decode()}")
        first, last, done = 0.0, b"", False
        async for line in reader:
            if line.startswith(b'data: {"error"'):
                raise RuntimeError(line.decode()[:200])
            if line.startswith(b"data: {"):
                last = line
                if not first and b'"content":' in line and b'"content":""' not in line:
                    first = time.perf_counter()
            done = done or b"[DONE]" in line
        if not done:
            raise RuntimeError("the stream broke off")
        return first or time.perf_counter(), json.loads(last.removeprefix(b"data: "))["usage"]


def rss(pid: int | None) -> float | None:
    """MB."""
    if pid is None:
        return None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def main(url: str, streams: int, seconds: float, tokens: int, pid: int | None) -> None:
    load, started, memory = Load(url, tokens), time.perf_counter(), list[float | None]()
    users = [asyncio.create_task(load.user(i, started + seconds)) for i in range(streams)]
    while not all(user.done() for user in users):
        await asyncio.sleep(min(10, seconds / 4))
        memory.append(rss(pid))
    spent = time.perf_counter() - started
    status = httpx.get(f"{url}/v1/peagle/status", timeout=60).json()["engines"]
    cuts = statistics.quantiles(load.first, n=100) if len(load.first) > 1 else [0.0] * 99
    print(
        json.dumps(
            {
                "streams": streams,
                "seconds": round(spent, 1),
                "answers": len(load.whole),
                "errors": load.errors,
                "tokens_per_second": round(load.said / spent, 1),
                "ttft_p50": round(cuts[49], 3),
                "ttft_p99": round(cuts[98], 3),
                "rss_mb": [None if m is None else round(m) for m in memory],
                "kv_usage_after": {name: one["kv_usage"] for name, one in status.items()},
                "acceptance_length": {
                    name: one["acceptance_length"] for name, one in status.items()
                },
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pid", type=int)
    asyncio.run(main(**vars(parser.parse_args())))

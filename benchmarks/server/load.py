"""Load `peagle serve` with many streams: errors, time to first token, memory and KV pages.

python -m benchmarks.server.load http://127.0.0.1:8000 --streams 200 --seconds 300 --pid PID
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

PROMPTS = [
    "Write a function that adds two numbers.",
    "Why is the sky blue?",
    "Tell me a story about rain.",
    "What is 12 * 7?",
]


class Load:
    """Users on plain sockets: a client that parses every chunk would be slower than the server."""

    def __init__(self, url: str, tokens: int) -> None:
        self.url = urlsplit(url)
        self.tokens = tokens
        self.first_token_seconds: list[float] = []
        self.request_seconds: list[float] = []
        self.errors: dict[str, int] = {}
        self.generated_tokens = 0

    async def user(self, number: int, end: float) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            try:
                await self.ask(rng)
            except Exception as error:
                name = f"{type(error).__name__}: {error}"[:80]
                self.errors[name] = self.errors.get(name, 0) + 1
                await asyncio.sleep(0.2)

    async def ask(self, rng: random.Random) -> None:
        body = {
            "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
            "stream": True,
            "seed": rng.randrange(99),
            "max_tokens": rng.randint(self.tokens // 2, self.tokens),
            "temperature": rng.choice([0, 0.8]),
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\n"
            f"host: {self.url.netloc}\r\nconnection: close\r\n"
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
        self.first_token_seconds.append(first - started)
        self.request_seconds.append(time.perf_counter() - started)
        self.generated_tokens += usage["completion_tokens"]

    async def read(self, reader: asyncio.StreamReader) -> tuple[float, dict[str, int]]:
        """The time of the first token, and the usage."""
        status = (await reader.readline()).split()[1]
        if status != b"200":
            raise RuntimeError(f"HTTP {status.decode()}")
        first = 0.0
        last = b""
        done = False
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


def resident_megabytes(pid: int | None) -> float | None:
    if pid is None:
        return None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def main(url: str, streams: int, seconds: float, tokens: int, pid: int | None) -> None:
    load = Load(url, tokens)
    memory: list[float | None] = []
    started = time.perf_counter()
    users = [asyncio.create_task(load.user(i, started + seconds)) for i in range(streams)]
    while not all(user.done() for user in users):
        await asyncio.sleep(min(10, seconds / 4))
        memory.append(resident_megabytes(pid))
    spent = time.perf_counter() - started
    status = httpx.get(f"{url}/v1/peagle/status", timeout=60).json()["engines"]
    first = load.first_token_seconds
    percentiles = statistics.quantiles(first, n=100) if len(first) > 1 else [0.0] * 99
    result = {
        "streams": streams,
        "seconds": round(spent, 1),
        "answers": len(load.request_seconds),
        "errors": load.errors,
        "tokens_per_second": round(load.generated_tokens / spent, 1),
        "ttft_p50": round(percentiles[49], 3),
        "ttft_p99": round(percentiles[98], 3),
        "rss_mb": [None if size is None else round(size) for size in memory],
        "kv_usage_after": {name: engine["kv_usage"] for name, engine in status.items()},
        "acceptance_length": {name: engine["acceptance_length"] for name, engine in status.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pid", type=int)
    asyncio.run(main(**vars(parser.parse_args())))

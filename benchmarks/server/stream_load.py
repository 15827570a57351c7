"""Streams from several client processes, on plain sockets: the client is not what is measured.

    python -m benchmarks.server.stream_load < job.json       # one client process

A job is a list of request bodies and a number of streams. Each stream takes the next body when its
answer is complete. A client that parses every chunk would be slower than the server: only the last
chunk of an answer is parsed, for its usage.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

Body = Mapping[str, Any]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LAST_CHUNK = b"0\r\n"  # Of a chunked body; an empty line follows.
CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"


@dataclass(slots=True)
class LoadResult:
    tokens: int = 0
    answers: int = 0
    start: float = 0.0  # By the monotonic clock, which all processes of a machine share.
    end: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    answer_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0  # Of the client processes.
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.end - self.start, 1e-9)

    def first_token_ms(self, fraction: float) -> float:
        return percentile_ms(self.first_token_seconds, fraction)

    def answer_ms(self, fraction: float) -> float:
        return percentile_ms(self.answer_seconds, fraction)


def percentile_ms(seconds: list[float], fraction: float) -> float:
    times = sorted(seconds) or [0.0]
    return 1000 * times[min(len(times) - 1, int(fraction * len(times)))]


def request_body(prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
    """A greedy, streamed request of exactly so many tokens; a list is a prompt of token ids."""
    asked: dict[str, Any] = {"prompt": prompt}
    if isinstance(prompt, str):
        asked = {"messages": [{"role": "user", "content": prompt}]}
    return asked | {
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def encode_request(url: str, body: Body) -> bytes:
    data = json.dumps(body).encode()
    path = CHAT_PATH if "messages" in body else TEXT_PATH
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class StreamLoad:
    def __init__(self, url: str, bodies: Sequence[Body]) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname, parts.port
        self.waiting = [encode_request(url, body) for body in reversed(bodies)]
        self.result = LoadResult()

    async def run(self, streams: int) -> LoadResult:
        self.result.start = time.monotonic()
        await asyncio.gather(*(self._stream() for _ in range(streams)))
        self.result.end = time.monotonic()
        self.result.cpu_seconds = time.process_time()
        return self.result

    async def _stream(self) -> None:
        """Send request after request on one connection, as clients with a pool do."""
        connection: Connection | None = None
        while self.waiting:
            request = self.waiting.pop()
            try:
                connection = connection or await asyncio.open_connection(
                    *self.address, limit=1 << 20
                )
                await self._ask(request, connection)
            except (OSError, ValueError, EOFError) as error:
                self.result.errors[f"{type(error).__name__}: {error}"[:120]] += 1
                if connection is not None:
                    connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    async def _ask(self, request: bytes, connection: Connection) -> None:
        reader, writer = connection
        started = time.monotonic()
        writer.write(request)
        first, usage = await read_answer(reader)
        self.result.answers += 1
        self.result.tokens += usage["completion_tokens"]
        self.result.first_token_seconds.append(first - started)
        self.result.answer_seconds.append(time.monotonic() - started)


async def read_answer(reader: asyncio.StreamReader) -> tuple[float, dict[str, int]]:
    """The time of the first chunk, and the usage in the last one."""
    status = (await reader.readline()).split()[1:2]
    if status != [b"200"]:
        raise ValueError(f"HTTP {status}")
    first = 0.0
    last = b""
    usage: dict[str, int] = {}
    async for line in reader:
        if line.startswith(b'data: {"error"'):
            raise ValueError(line.decode()[:100])
        if line.startswith(b"data: {"):
            first = first or time.monotonic()
            last = line
        elif line.startswith(b"data: [DONE]"):
            usage = json.loads(last.removeprefix(b"data: "))["usage"]
        elif line == LAST_CHUNK:
            await reader.readline()
            return first, usage
    raise EOFError("the stream broke off")


def drive(url: str, bodies: Sequence[Body], streams: int, clients: int) -> LoadResult:
    """Send all requests, `streams` at a time, from that many client processes."""
    clients = max(1, min(clients, streams))
    processes = []
    for i in range(clients):
        own = streams // clients + (i < streams % clients)
        job = {"url": url, "bodies": bodies[i::clients], "streams": own}
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server.stream_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append((process, json.dumps(job).encode()))
    for process, data in processes:  # They are started, and begin when they have their job.
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.close()
    total = LoadResult(start=float("inf"))
    for process, _ in processes:
        assert process.stdout is not None
        merge(total, json.loads(process.stdout.read()))
        process.wait()
    return total


def merge(total: LoadResult, part: dict[str, Any]) -> None:
    total.tokens += part["tokens"]
    total.answers += part["answers"]
    total.start = min(total.start, part["start"])
    total.end = max(total.end, part["end"])
    total.first_token_seconds += part["first_token_seconds"]
    total.answer_seconds += part["answer_seconds"]
    total.cpu_seconds += part["cpu_seconds"]
    total.errors.update(part["errors"])


def main() -> None:
    job = json.load(sys.stdin)
    load = StreamLoad(job["url"], job["bodies"])
    print(json.dumps(asdict(asyncio.run(load.run(job["streams"])))))


if __name__ == "__main__":
    main()

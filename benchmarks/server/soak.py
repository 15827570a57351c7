"""Hundreds of streams for minutes, with the engine killed once in the middle.

    python -m benchmarks.server.soak                         # the tiny pair of the tests, on a CPU
    python -m benchmarks.server.soak --pair smollm2-135m --streams 200 --seconds 300
    python -m benchmarks.server.soak --streams 50 --idle 1000 --seconds 40 --no-kill

Each stream sends its next request when its answer is complete. With `kill -9` of the engine:

    answered     whole answers
    told         the answer had begun, and ended with the error "the engine stopped"
    full         429: while the engine is replaced, no more requests wait than the queue holds
    refused      503 with Retry-After, before anything was accepted, although requests wait while
                 the engine is replaced: a mistake
    queued, told accepted, nothing sent yet, and ended with an error: a mistake
    other        everything else: a mistake

The exit code is 1 if there was a mistake, if a request that was queued at the kill was not
answered, if an error comes after the replacement, if an idle connection was lost, or if memory
grew.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.server.process import ServerProcess, is_healthy, resident_mb, serving

PROMPTS = ("Write a function that adds two numbers.", "Why is the sky blue?", "What is 12 * 7?")
TINY_OPTIONS = ("--dtype", "float32", "--device", "cpu", "--kv-tokens", "65536", "-k", "3")
RETRY_SECONDS = 1.0
SAMPLES = 20  # Lines of the table.
MAX_GROWTH_MB = 24.0
MAX_GROWTH = 0.08  # Of the memory, where that is more.
SETTLED = 0.3  # Share of a phase after which memory must be flat.
REFUSALS = {b"429": "full", b"503": "refused"}
MISTAKES = ("refused", "queued, told", "other")


@dataclass(slots=True, eq=False)
class SoakRequest:
    accepted: bool = False
    has_tokens: bool = False
    outcome: str = ""


@dataclass(slots=True)
class Sample:
    seconds: float
    answers: int
    tokens: int
    front_mb: float
    engine_mb: float
    engine_pid: int


@dataclass(slots=True)
class Soak:
    url: str
    max_tokens: int
    engine_pid: int
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    active: set[SoakRequest] = field(default_factory=set)
    queued_at_kill: list[SoakRequest] = field(default_factory=list)
    recovered_at: float = 0.0  # When the next engine process was ready; 0.0: not yet.
    recovery_seconds: float = 0.0
    late_errors: int = 0  # Requests sent after that which were not answered.
    errors: Counter[str] = field(default_factory=Counter)

    async def user(self, number: int, end: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            request = SoakRequest()
            self.active.add(request)
            sent_at = time.monotonic()
            try:
                await self._ask(request, rng)
            except (OSError, ValueError, EOFError) as error:
                request.outcome = "other"
                self.errors[f"{type(error).__name__}: {error}"[:100]] += 1
            self.active.discard(request)
            self.outcomes[request.outcome] += 1
            late = self.recovered_at and sent_at > self.recovered_at
            self.late_errors += bool(late and request.outcome != "answered")
            if request.outcome != "answered":
                await asyncio.sleep(RETRY_SECONDS)

    def kill(self) -> None:
        self.queued_at_kill = [r for r in self.active if r.accepted and not r.has_tokens]
        os.kill(self.engine_pid, signal.SIGKILL)

    def sample(self, started: float, front_pid: int) -> Sample:
        seconds = time.monotonic() - started
        answers = self.outcomes["answered"]
        sizes = resident_mb(front_pid), resident_mb(self.engine_pid)
        return Sample(seconds, answers, self.tokens, *sizes, self.engine_pid)

    async def _ask(self, request: SoakRequest, rng: random.Random) -> None:
        body = {
            "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
            "stream": True,
            "seed": rng.randrange(99),
            "max_tokens": rng.randint(self.max_tokens // 2, self.max_tokens),
            "temperature": rng.choice([0, 0.8]),
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        reader, writer = await connect(self.url)
        try:
            writer.write(post(self.url, body))
            await self._read(request, reader)
        finally:
            writer.close()

    async def _read(self, request: SoakRequest, reader: asyncio.StreamReader) -> None:
        line = await reader.readline()
        status = line.split()[1] if line else b"no response"
        if status != b"200":
            request.outcome = REFUSALS.get(status, "other")
            self.errors[f"HTTP {status.decode()}"] += 1
            return
        request.accepted = True
        usage = 0
        async for line in reader:
            if line.startswith(b'data: {"error"'):
                self.errors[json.loads(line[6:])["error"]["message"]] += 1
                told = b"the engine stopped" in line
                request.outcome = "other" if not told else "queued, told"
                if told and request.has_tokens:
                    request.outcome = "told"
                return
            if b'"content":' in line:
                request.has_tokens = True
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]["completion_tokens"]
            if b"[DONE]" in line:
                request.outcome = "answered"
                self.tokens += usage
                return
        raise EOFError("the stream broke off")


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)


def post(url: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        "connection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class IdleConnections:
    """Connections that send nothing, until each of them asks for the model's name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def start(self, count: int) -> None:
        self.open = [await connect(self.url) for _ in range(count)]

    async def lost(self) -> int:
        """How many are not answered any more."""
        return sum([not await self._ask(*connection) for connection in self.open])

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        host = urlsplit(self.url).netloc
        try:
            writer.write(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            return b"200" in await asyncio.wait_for(reader.readline(), 60)
        except OSError:
            return False
        finally:
            writer.close()


async def replace_engine(run: Soak, server: ServerProcess, seconds: float) -> None:
    """Kill the engine after some time, and wait until another one is ready."""
    await asyncio.sleep(seconds)
    killed = run.engine_pid
    run.kill()
    killed_at = time.monotonic()
    while not run.recovered_at:
        await asyncio.sleep(0.05)
        if await asyncio.to_thread(is_healthy, server.url):
            pid = await asyncio.to_thread(lambda: server.engine_pid)
            if pid not in (killed, server.pid):
                run.engine_pid = pid
                run.recovered_at = time.monotonic()
    run.recovery_seconds = run.recovered_at - killed_at


async def soak(server: ServerProcess, options: argparse.Namespace) -> bool:
    """Run the load; print a table and the outcome; return whether all is well."""
    run = Soak(server.url, options.tokens, server.engine_pid)
    idle = IdleConnections(server.url)
    await idle.start(options.idle)
    started = time.monotonic()
    end = started + options.seconds
    users = [asyncio.create_task(run.user(i, end)) for i in range(options.streams)]
    killer = None
    if options.kill:
        killer = asyncio.create_task(replace_engine(run, server, options.seconds / 2))
    print("   s  answers  tokens/s  front MB  engine MB", flush=True)
    samples = [run.sample(started, server.pid)]
    while not all(user.done() for user in users):
        await asyncio.wait(users, timeout=options.seconds / SAMPLES)
        samples.append(run.sample(started, server.pid))
        print_sample(samples[-1], samples[-2])
    if killer is not None:
        await killer
    return report(run, samples, await idle.lost())


def print_sample(sample: Sample, previous: Sample) -> None:
    seconds = max(sample.seconds - previous.seconds, 1e-9)
    speed = (sample.tokens - previous.tokens) / seconds
    print(
        f"{sample.seconds:4.0f}  {sample.answers:7d}  {speed:8.0f}  {sample.front_mb:8.1f}"
        f"  {sample.engine_mb:9.1f}",
        flush=True,
    )


def growth(sizes: list[float]) -> tuple[float, bool]:
    """MB from the first settled sample to the median of the last ones; whether that is flat."""
    settled = sizes[int(len(sizes) * SETTLED) :]
    if len(settled) < 2:
        return 0.0, True
    grown = statistics.median(settled[-3:]) - settled[0]
    return grown, grown <= max(MAX_GROWTH_MB, MAX_GROWTH * settled[0])


def report(run: Soak, samples: list[Sample], lost: int) -> bool:
    print("outcomes:", dict(run.outcomes), "errors:", dict(run.errors))
    queued = Counter(request.outcome for request in run.queued_at_kill)
    if run.recovered_at:
        print(
            f"queued at the kill: {dict(queued)}; replaced after {run.recovery_seconds:.1f} s;"
            f" errors of requests after that: {run.late_errors}"
        )
    well = not any(run.outcomes[name] for name in MISTAKES) and not run.late_errors
    # A client may not have seen the first tokens of an answer yet: then it is told.
    well &= set(queued) <= {"answered", "told"} and not lost
    if not run.recovered_at:
        well &= set(run.outcomes) <= {"answered"}
    print("idle connections lost:", lost)
    memory = {"front": [s.front_mb for s in samples]}
    for pid in dict.fromkeys(s.engine_pid for s in samples):
        sizes = [s.engine_mb for s in samples if s.engine_pid == pid]
        memory[f"engine {pid}"] = [size for size in sizes if size]  # 0.0: it was killed.
    for name, sizes in memory.items():
        grown, flat = growth(sizes)
        print(f"{name}: {grown:+.1f} MB, {'flat' if flat else 'NOT FLAT'}")
        well &= flat
    print("soak:", "passed" if well else "FAILED")
    return well


@contextmanager
def pair_arguments(pair: str) -> Iterator[list[str]]:
    """The arguments of `peagle serve` for a pair; "tiny": that of the tests, made here."""
    if pair != "tiny":
        yield [pair]
        return
    from tests.support.server.serving import tiny_folder

    with tempfile.TemporaryDirectory() as name:
        folder = tiny_folder(Path(name))
        drafter = str(folder / "p-eagle")
        yield [str(folder / "target"), "--drafter", drafter, *TINY_OPTIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=64, help="the longest answer")
    parser.add_argument("--idle", type=int, default=0, help="connections that send nothing")
    parser.add_argument("--no-kill", dest="kill", action="store_false")
    parser.add_argument("serve", nargs="*", help="further options of `peagle serve`, after --")
    options = parser.parse_args()
    with pair_arguments(options.pair) as arguments, serving([*arguments, *options.serve]) as server:
        well = asyncio.run(soak(server, options))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()

"""The same load on an OpenAI-compatible endpoint: streamed chat completions, one connection a user.

An endpoint that fails does not end a run: every failed request is counted, with what it said. How drafts fared is read
from /metrics before and after, where there are vLLM's counters.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from peagle.bench.load.jobs import LoadJob, RequestRecord, Seen, shortened
from peagle.errors import UserError
from peagle.results.cell import CellKey, CellRun, SpecCounters

CONNECT, READ = 20.0, 600.0  # seconds without a connection, without a byte
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE
)
POSITION = re.compile(r'position="(\d+)"')


class EndpointDown(Exception):
    """Nobody answers at all."""


class EndpointRunner:
    def __init__(
        self,
        url: str,
        model: str | None,
        key: str | None,
        temperature: float,
        warmup: int,
        read: float = READ,
    ) -> None:
        self.chat, self.models, self.metrics = urls_of(url)
        self.temperature, self.warmup = temperature, warmup
        self.guessed = 0  # answers whose tokens the server did not count
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.timeout = httpx.Timeout(read, connect=CONNECT)
        self.model = model if model is not None else self.find_model()

    def find_model(self) -> str:
        """The first one that is served; none is named where the endpoint does not tell."""
        try:
            reply = httpx.get(self.models, headers=self.headers, timeout=CONNECT)
            return str(reply.json()["data"][0]["id"]) if reply.status_code == 200 else ""
        except httpx.TransportError as error:
            raise EndpointDown(
                f"no answer from {self.models} ({said(error)}): start it, or correct --endpoint"
            ) from error
        except httpx.InvalidURL as error:
            raise UserError(f"cannot ask {self.models}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError):
            return ""

    def run(self, key: CellKey, jobs: Sequence[LoadJob], seen: Seen) -> CellRun:
        return asyncio.run(self._run(key, jobs, seen))

    def close(self) -> None:
        pass

    async def _run(self, key: CellKey, jobs: Sequence[LoadJob], seen: Seen) -> CellRun:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=key.concurrency)
        async with httpx.AsyncClient(
            headers=self.headers, timeout=self.timeout, limits=limits
        ) as client:
            await self._drive(
                client, shortened(jobs, key.concurrency, self.warmup), key.concurrency, lambda: None
            )
            before = await self._spec(client)
            started = time.perf_counter()
            records = await self._drive(client, jobs, key.concurrency, seen)
            ended = max(
                (record.arrivals[-1] for record in records if record.arrivals),
                default=time.perf_counter(),
            )
            after = await self._spec(client)
        spec = after.minus(before) if after is not None and before is not None else None
        return CellRun(
            records, ended - started, spec=spec if spec is not None and spec.drafts else None
        )

    async def _drive(
        self, client: httpx.AsyncClient, jobs: Sequence[LoadJob], users: int, seen: Seen
    ) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        left = iter(jobs)
        await asyncio.gather(
            *(self._user(client, left, records, seen) for _ in range(min(users, len(jobs))))
        )
        return records

    async def _user(
        self,
        client: httpx.AsyncClient,
        left: Iterator[LoadJob],
        records: list[RequestRecord],
        seen: Seen,
    ) -> None:
        for job in left:  # shared: each takes the next
            answers: list[str] = []
            for turn in range(len(job.task.turns)):
                record = RequestRecord(job.task.id, turn, time.perf_counter())
                records.append(record)
                await self._ask(client, job, answers, record)
                seen()
                if record.error is not None:
                    break
                answers.append(record.text)

    async def _ask(
        self, client: httpx.AsyncClient, job: LoadJob, answers: list[str], record: RequestRecord
    ) -> None:
        body = {
            "model": self.model,
            "messages": job.messages(answers),
            "max_tokens": job.max_tokens,
            "temperature": self.temperature,
            "seed": job.turn_seed(record.turn),
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True, "min_tokens": job.max_tokens} if job.ignore_eos else {})
        record.start = time.perf_counter()
        try:
            async with client.stream("POST", self.chat, json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    record.error = f"HTTP {reply.status_code}: {' '.join(text.split())[:200]}"
                    return
                await self._read(reply, record)
        except httpx.InvalidURL as error:
            raise UserError(f"cannot ask {self.chat}: {error}") from error
        except (
            httpx.HTTPError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:
            record.error = said(error)

    async def _read(self, reply: httpx.Response, record: RequestRecord) -> None:
        pieces, ended, told = 0, False, None
        async for event in events(reply):
            if event.get("error"):
                error = event["error"]
                record.error = str(error.get("message") if isinstance(error, dict) else error)[:200]
                return
            if event.get("usage"):
                told = event["usage"].get("completion_tokens")
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                text = delta.get("content") or ""
                if text or delta.get("reasoning_content") or delta.get("reasoning"):
                    record.arrivals.append(time.perf_counter())
                    record.text += text
                    pieces += 1
                ended = ended or choice.get("finish_reason") is not None
        if not ended:
            record.error = "the stream broke off before the answer ended"
            return
        record.tokens = int(told) if told is not None else pieces
        self.guessed += told is None
        if not record.arrivals:  # an answer without text: it came all the same
            record.arrivals.append(time.perf_counter())

    async def _spec(self, client: httpx.AsyncClient) -> SpecCounters | None:
        try:
            reply = await client.get(self.metrics, timeout=CONNECT)
        except httpx.HTTPError:
            return None
        return parse_metrics(reply.text) if reply.status_code == 200 else None


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is an object, not {data[:50]!r}")
        yield event


def parse_metrics(text: str) -> SpecCounters | None:
    """vLLM's counters, of all its engines together. None: there are none."""
    spec, found = SpecCounters(), False
    at: dict[int, int] = {}
    for name, labels, value in COUNTER.findall(text):
        count = int(float(value))
        if name == "drafts":
            spec.drafts, found = spec.drafts + count, True
        elif name == "draft_tokens":
            spec.draft_tokens += count
        elif name == "accepted_tokens":
            spec.accepted += count
        elif name == "accepted_tokens_per_pos" and (position := POSITION.search(labels)):
            at[int(position[1])] = at.get(int(position[1]), 0) + count
    if not found:
        return None
    spec.accepted_at = [at.get(i, 0) for i in range(max(at) + 1)] if at else []
    spec.tried_at = [spec.drafts] * len(spec.accepted_at)
    return spec


def urls_of(url: str) -> tuple[str, str, str]:
    """Chat completions, models, metrics: from http://host:8000, .../v1 or .../v1/chat/completions."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--endpoint {url!r} is no URL: write it like http://localhost:8000/v1")
    base = url.split("?")[0].rstrip("/").removesuffix("/chat/completions")
    base = (
        base
        if re.search(r"/v\d+$", base) or url.rstrip("/").endswith("/chat/completions")
        else f"{base}/v1"
    )
    root = re.sub(r"/v\d+$", "", base)
    return f"{base}/chat/completions", f"{base}/models", f"{root}/metrics"


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200] if str(error) else type(error).__name__

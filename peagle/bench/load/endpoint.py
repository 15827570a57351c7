"""EndpointRunner: the same load on an OpenAI-compatible server, with streamed chat completions.

A failing server does not end a run: every failed request is counted, with its error. Acceptance is
read from /metrics before and after the run, where the server exports vLLM's counters.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import httpx

from peagle.bench.load.jobs import LoadJob, OnRequest, warmup_jobs
from peagle.bench.load.server_metrics import parse_metrics
from peagle.bench.load.sse import read_events
from peagle.errors import UserError
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey
from peagle.results.request_record import RequestRecord
from peagle.results.spec_counters import SpecCounters

CONNECT_TIMEOUT = 20.0  # seconds
READ_TIMEOUT = 600.0  # seconds without a byte
MAX_ERROR_CHARACTERS = 200
MALFORMED_ANSWER = (ValueError, KeyError, TypeError, IndexError, AttributeError)


class EndpointDown(Exception):
    """The server does not answer."""


class EndpointRunner:
    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        temperature: float,
        warmup: int,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        self.chat_url, self.models_url, self.metrics_url = endpoint_urls(url)
        self.temperature = temperature
        self.warmup = warmup
        self.uncounted_answers = 0  # answers without `usage`: their chunks are counted as tokens
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.timeout = httpx.Timeout(read_timeout, connect=CONNECT_TIMEOUT)
        self.model = model if model is not None else self.find_model()

    def find_model(self) -> str:
        """The first model that is served; an empty name where the server does not list any."""
        try:
            reply = httpx.get(self.models_url, headers=self.headers, timeout=CONNECT_TIMEOUT)
            return str(reply.json()["data"][0]["id"]) if reply.status_code == 200 else ""
        except httpx.TransportError as error:
            raise EndpointDown(
                f"no answer from {self.models_url} ({describe_error(error)}):"
                " start the server, or correct `endpoint`"
            ) from error
        except httpx.InvalidURL as error:
            raise UserError(f"{self.models_url} is not a valid URL: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError):
            return ""

    def run(self, key: CellKey, jobs: Sequence[LoadJob], on_request: OnRequest) -> CellRun:
        return asyncio.run(self._run(key, jobs, on_request))

    def close(self) -> None:
        pass

    async def _run(self, key: CellKey, jobs: Sequence[LoadJob], on_request: OnRequest) -> CellRun:
        users = key.concurrency
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=users)
        async with httpx.AsyncClient(
            headers=self.headers, timeout=self.timeout, limits=limits
        ) as client:
            await self._drive(client, warmup_jobs(jobs, users, self.warmup), users, lambda: None)
            before = await self._read_counters(client)
            start = time.perf_counter()
            records = await self._drive(client, jobs, users, on_request)
            end = max(
                (record.arrivals[-1] for record in records if record.arrivals),
                default=time.perf_counter(),
            )
            after = await self._read_counters(client)
        spec = after.minus(before) if after is not None and before is not None else None
        return CellRun(records, end - start, spec=spec if spec and spec.drafts else None)

    async def _drive(
        self,
        client: httpx.AsyncClient,
        jobs: Sequence[LoadJob],
        users: int,
        on_request: OnRequest,
    ) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        queue = iter(jobs)  # shared: every user takes the next job
        await asyncio.gather(
            *(
                self._run_user(client, queue, records, on_request)
                for _ in range(min(users, len(jobs)))
            )
        )
        return records

    async def _run_user(
        self,
        client: httpx.AsyncClient,
        queue: Iterator[LoadJob],
        records: list[RequestRecord],
        on_request: OnRequest,
    ) -> None:
        for job in queue:
            answers: list[str] = []
            for turn in range(len(job.task.turns)):
                record = RequestRecord(job.task.id, turn, time.perf_counter())
                records.append(record)
                await self._send(client, job, answers, record)
                on_request()
                if record.error is not None:
                    break
                answers.append(record.text)

    async def _send(
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
            async with client.stream("POST", self.chat_url, json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    summary = " ".join(text.split())[:MAX_ERROR_CHARACTERS]
                    record.error = f"HTTP {reply.status_code}: {summary}"
                    return
                await self._receive(reply, record)
        except httpx.InvalidURL as error:
            raise UserError(f"{self.chat_url} is not a valid URL: {error}") from error
        except (httpx.HTTPError, *MALFORMED_ANSWER) as error:
            record.error = describe_error(error)

    async def _receive(self, reply: httpx.Response, record: RequestRecord) -> None:
        chunks = 0
        finished = False
        completion_tokens = None
        async for event in read_events(reply):
            if error := event.get("error"):
                message = error.get("message") if isinstance(error, dict) else error
                record.error = str(message)[:MAX_ERROR_CHARACTERS]
                return
            if event.get("usage"):
                completion_tokens = event["usage"].get("completion_tokens")
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                text = delta.get("content") or ""
                if text or delta.get("reasoning_content") or delta.get("reasoning"):
                    record.arrivals.append(time.perf_counter())
                    record.text += text
                    chunks += 1
                finished = finished or choice.get("finish_reason") is not None
        if not finished:
            record.error = "the stream broke off before the answer ended"
            return
        record.tokens = int(completion_tokens) if completion_tokens is not None else chunks
        self.uncounted_answers += completion_tokens is None
        if not record.arrivals:  # an answer without text is still an answer
            record.arrivals.append(time.perf_counter())

    async def _read_counters(self, client: httpx.AsyncClient) -> SpecCounters | None:
        try:
            reply = await client.get(self.metrics_url, timeout=CONNECT_TIMEOUT)
        except httpx.HTTPError:
            return None
        return parse_metrics(reply.text) if reply.status_code == 200 else None


def endpoint_urls(url: str) -> tuple[str, str, str]:
    """The URLs of chat completions, models and metrics.

    Accepts http://host:8000, http://host:8000/v1 and http://host:8000/v1/chat/completions.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"`endpoint` {url!r} is not a URL: write it like http://localhost:8000/v1")
    base = url.split("?")[0].rstrip("/").removesuffix("/chat/completions")
    if not re.search(r"/v\d+$", base) and not url.rstrip("/").endswith("/chat/completions"):
        base = f"{base}/v1"
    root = re.sub(r"/v\d+$", "", base)
    return f"{base}/chat/completions", f"{base}/models", f"{root}/metrics"


def describe_error(error: Exception) -> str:
    name = type(error).__name__
    return f"{name}: {error}"[:MAX_ERROR_CHARACTERS] if str(error) else name

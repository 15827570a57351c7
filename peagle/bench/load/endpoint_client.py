"""EndpointClient: closed-loop users of one process on an OpenAI-compatible server.

A failed request is recorded with its error, and its user goes on with the next job.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from peagle.bench.load.jobs import LoadJob, OnRequest
from peagle.bench.load.sse import read_events
from peagle.errors import UserError
from peagle.results.request_record import RequestRecord

CONNECT_TIMEOUT = 20.0  # seconds
READ_TIMEOUT = 600.0  # seconds without a byte
MAX_ERROR_CHARACTERS = 200
MALFORMED_ANSWER = (ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(slots=True)
class EndpointClient:
    chat_url: str
    model: str
    headers: dict[str, str] = field(repr=False)  # may hold the API key
    temperature: float
    read_timeout: float = READ_TIMEOUT
    uncounted_answers: int = 0  # answers without `usage`: their chunks are counted as tokens

    def connect(self, users: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=httpx.Timeout(self.read_timeout, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=users),
        )

    async def drive(
        self,
        connections: httpx.AsyncClient,
        queue: Iterator[LoadJob],
        users: int,
        on_request: OnRequest = lambda: None,
    ) -> list[RequestRecord]:
        """Answer all jobs of the queue: every user takes the next one."""
        records: list[RequestRecord] = []
        await asyncio.gather(
            *(self._run_user(connections, queue, records, on_request) for _ in range(users))
        )
        return records

    async def _run_user(
        self,
        connections: httpx.AsyncClient,
        queue: Iterator[LoadJob],
        records: list[RequestRecord],
        on_request: OnRequest,
    ) -> None:
        for job in queue:
            answers: list[str] = []
            for turn in range(len(job.task.turns)):
                record = RequestRecord(job.task.id, turn, time.perf_counter())
                records.append(record)
                await self._send(connections, job, answers, record)
                on_request()
                if record.error is not None:
                    break
                answers.append(record.text)

    async def _send(
        self,
        connections: httpx.AsyncClient,
        job: LoadJob,
        answers: Sequence[str],
        record: RequestRecord,
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
            async with connections.stream("POST", self.chat_url, json=body) as reply:
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


def authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise UserError("`api_key` has characters that an HTTP header cannot hold: copy it again")
    return {"Authorization": f"Bearer {api_key}"}


def describe_error(error: Exception) -> str:
    name = type(error).__name__
    return f"{name}: {error}"[:MAX_ERROR_CHARACTERS] if str(error) else name

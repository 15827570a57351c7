"""EndpointRunner: the same load on an OpenAI-compatible server, with streamed chat completions.

A failing server does not end a run: every failed request is counted, with its error. Acceptance is
read from /metrics before and after the run, where the server exports vLLM's counters. With several
clients the users are spread over processes, so that the client is not what limits the load.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

from peagle.bench.load.client_processes import ClientProcesses
from peagle.bench.load.endpoint_client import (
    CONNECT_TIMEOUT,
    READ_TIMEOUT,
    EndpointClient,
    authorization,
    describe_error,
)
from peagle.bench.load.jobs import LoadJob, OnRequest, warmup_jobs
from peagle.bench.load.server_metrics import parse_metrics
from peagle.errors import UserError
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey
from peagle.results.request_record import RequestRecord
from peagle.results.spec_counters import SpecCounters


class EndpointRunner:
    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        temperature: float,
        warmup: int,
        read_timeout: float = READ_TIMEOUT,
        clients: int = 1,
    ) -> None:
        """`clients`: processes that send the load; 1 is this process."""
        chat_url, self.models_url, self.metrics_url = endpoint_urls(url)
        self.warmup = warmup
        self.headers = authorization(api_key)
        self.model = model if model is not None else self.find_model()
        self.client = EndpointClient(chat_url, self.model, self.headers, temperature, read_timeout)
        self.clients = clients
        self.processes: ClientProcesses | None = None  # started by the first run

    @property
    def uncounted_answers(self) -> int:
        return self.client.uncounted_answers

    def find_model(self) -> str:
        """The first model that is served; an empty name where the server does not list any."""
        try:
            reply = httpx.get(self.models_url, headers=self.headers, timeout=CONNECT_TIMEOUT)
            return str(reply.json()["data"][0]["id"]) if reply.status_code == 200 else ""
        except httpx.TransportError as error:
            raise UserError(
                f"no answer from {self.models_url} ({describe_error(error)}):"
                " start the server, or correct `endpoint`"
            ) from error
        except httpx.InvalidURL as error:
            raise UserError(f"{self.models_url} is not a valid URL: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError):
            return ""

    def run(self, key: CellKey, jobs: Sequence[LoadJob], on_request: OnRequest) -> CellRun:
        warmup = warmup_jobs(jobs, key.concurrency, self.warmup)
        if self.clients == 1:
            return asyncio.run(self._run_here(key.concurrency, warmup, jobs, on_request))
        if self.processes is None:
            self.processes = ClientProcesses(self.client, self.clients)
        self.processes.prepare(key.concurrency, warmup, jobs)
        before = self.read_counters()
        start = time.perf_counter()
        records = self.processes.run(on_request)
        return cell_run(records, start, before, self.read_counters())

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()

    async def _run_here(
        self,
        users: int,
        warmup: Sequence[LoadJob],
        jobs: Sequence[LoadJob],
        on_request: OnRequest,
    ) -> CellRun:
        async with self.client.connect(users) as connections:
            await self.client.drive(connections, iter(warmup), min(users, len(warmup)))
            before = self.read_counters()
            start = time.perf_counter()
            records = await self.client.drive(
                connections, iter(jobs), min(users, len(jobs)), on_request
            )
        return cell_run(records, start, before, self.read_counters())

    def read_counters(self) -> SpecCounters | None:
        """None where the server has no such counters, or does not answer."""
        try:
            reply = httpx.get(self.metrics_url, headers=self.headers, timeout=CONNECT_TIMEOUT)
        except httpx.HTTPError:
            return None
        return parse_metrics(reply.text) if reply.status_code == 200 else None


def cell_run(
    records: list[RequestRecord],
    start: float,
    before: SpecCounters | None,
    after: SpecCounters | None,
) -> CellRun:
    """The run ends with the last chunk that arrived."""
    end = max(
        (record.arrivals[-1] for record in records if record.arrivals),
        default=time.perf_counter(),
    )
    spec = after.minus(before) if after is not None and before is not None else None
    return CellRun(records, end - start, spec=spec if spec and spec.drafts else None)


def endpoint_urls(url: str) -> tuple[str, str, str]:
    """The URLs of chat completions, models and metrics.

    Accepts http://host:8000, http://host:8000/v1 and http://host:8000/v1/chat/completions.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets of an IPv6 address
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url!r} is not a URL: write it like http://localhost:8000")
    base = url.split("?")[0].rstrip("/").removesuffix("/chat/completions")
    if not re.search(r"/v\d+$", base) and not url.rstrip("/").endswith("/chat/completions"):
        base = f"{base}/v1"
    root = re.sub(r"/v\d+$", "", base)
    return f"{base}/chat/completions", f"{base}/models", f"{root}/metrics"

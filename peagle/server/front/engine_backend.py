"""EngineBackend: the backend that answers with engines of this package, in their processes."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from peagle.learn.folder import LearnFolder
from peagle.server.front.engine_client import UNAVAILABLE, EngineClient
from peagle.server.front.engine_counts import EngineCounts
from peagle.server.front.metrics import RequestMetrics
from peagle.server.http.backend import RouteHandler, check_model_name, get_backend
from peagle.server.http.drain import Drain
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.learning.consent import LearnConsent
from peagle.server.learning.folder_state import FolderState, describe_learning, read_state
from peagle.server.learning.metrics import LearnCollector
from peagle.server.settings import ServerSettings


@dataclass(slots=True)
class EngineBackend:
    settings: ServerSettings
    route_handlers: Mapping[str, RouteHandler]
    engines: EngineClient
    ready_wait: float = 0.0  # Seconds to wait for the engines before connections are accepted.
    counts: EngineCounts = field(init=False)
    drain: Drain = field(init=False)
    response_counts: ResponseCounts = field(init=False)
    request_metrics: RequestMetrics = field(init=False)
    learn_consent: LearnConsent = field(init=False)
    learn_folder: LearnFolder | None = field(init=False)  # None: the server does not learn.
    learn_state: FolderState = field(default_factory=FolderState)  # As of the last `refresh`.
    model_names: tuple[str, ...] = field(init=False)
    model_name: str = field(init=False)
    open_streams: int = 0  # Answers that are being sent chunk by chunk.

    def __post_init__(self) -> None:
        self.model_names = self.settings.model_names  # Reading them looks at files.
        self.model_name = self.model_names[0]
        self.drain = Drain(self.settings.drain_seconds)
        self.drain.abort_pending = self.engines.pool.refuse_pending
        self.engines.check_accepting = self.drain.check_accepting
        self.engines.grammar_queue.check_accepting = self.drain.check_accepting
        self.drain.on_begin = self.engines.pool.wake_arrivals
        self.response_counts = ResponseCounts(self.model_name)
        self.counts = EngineCounts(self.engines)
        self.learn_consent = LearnConsent(self.settings)
        learn = self.settings.learn
        self.learn_folder = None if learn is None else LearnFolder(Path(learn))
        self.request_metrics = RequestMetrics(
            self.model_name, self.counts, self.response_counts, self.settings.http_workers > 1
        )
        if self.learn_folder is not None:
            learning = LearnCollector(
                self.model_name, self.counts.learn_reports, lambda: self.learn_state
            )
            self.request_metrics.registry.register(learning)

    def require(self, model: str | None) -> None:
        """Check that the server accepts a request for the model of this name.

        While the engine process is replaced, EngineClient.slot waits for the next one.
        """
        self.drain.check_accepting()
        check_model_name(model, self.model_names)
        self.engines.require_loaded()

    def require_ready(self, model: str | None) -> None:
        """The same for a request that does not wait while the engine process is replaced."""
        self.require(model)
        self.engines.require_ready()

    @property
    def is_healthy(self) -> bool:
        return self.engines.state == "ready" and not self.drain.is_draining

    @property
    def unavailable_reason(self) -> str:
        return UNAVAILABLE[self.engines.state]

    @property
    def context(self) -> int:
        return self.engines.context

    async def start(self, on_failure: Callable[[str], None]) -> None:
        self.engines.on_failure = on_failure
        self.engines.start()
        await self.engines.wait_until_ready(self.ready_wait)

    async def close(self) -> None:
        await self.engines.close()

    async def refresh(self) -> None:
        """Get a new status of every process, and of the learn folder."""
        await self.engines.refresh()
        if self.learn_folder is not None:
            self.learn_state = await asyncio.to_thread(read_state, self.learn_folder)

    async def status(self) -> dict[str, Any]:
        engines = self.engines
        await self.refresh()
        status = {
            "model": self.model_name,
            "state": engines.state,
            "restarts": self.counts.restarts,
            "heartbeat_age": round(self.counts.silence, 3),
            "scorings": self.counts.scorings,
            "methods": list(engines.methods),
            "method": engines.key.method,
            "k": engines.key.k,
            "engines": self.counts.summed(),
            "workers": [connection.report() for connection in self.counts.connections],
        }
        if self.learn_folder is not None:
            reports = self.counts.learn_reports()
            status["learn"] = describe_learning(self.learn_state, reports)
        return status

    async def metrics(self) -> bytes:
        await self.refresh()
        return self.request_metrics.page()


def engine_backend_of(request: Request) -> EngineBackend:
    backend = get_backend(request)
    assert isinstance(backend, EngineBackend)
    return backend

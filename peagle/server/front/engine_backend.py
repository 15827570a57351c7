"""EngineBackend: the backend that answers with engines of this package, in their processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from peagle.server.front.engine_client import UNAVAILABLE, EngineClient
from peagle.server.front.engine_counts import EngineCounts
from peagle.server.front.learn_consent import LearnConsent
from peagle.server.front.metrics import RequestMetrics
from peagle.server.http.backend import RouteHandler, check_model_name, get_backend
from peagle.server.http.drain import Drain
from peagle.server.http.response_counts import ResponseCounts
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
    model_names: tuple[str, ...] = field(init=False)
    model_name: str = field(init=False)
    open_streams: int = 0  # Answers that are being sent chunk by chunk.

    def __post_init__(self) -> None:
        self.model_names = self.settings.model_names  # Reading them looks at files.
        self.model_name = self.model_names[0]
        self.drain = Drain(self.settings.drain_seconds)
        self.drain.abort_pending = self.engines.pool.refuse_pending
        self.engines.grammar_queue.check_accepting = self.drain.check_accepting
        self.response_counts = ResponseCounts(self.model_name)
        self.counts = EngineCounts(self.engines)
        self.learn_consent = LearnConsent(self.settings)
        self.request_metrics = RequestMetrics(
            self.model_name, self.counts, self.response_counts, self.settings.http_workers > 1
        )

    def require(self, model: str | None) -> None:
        """Check that the server accepts a request for the model of this name."""
        self.drain.check_accepting()
        check_model_name(model, self.model_names)
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

    async def status(self) -> dict[str, Any]:
        engines = self.engines
        await engines.refresh()
        return {
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

    async def metrics(self) -> bytes:
        await self.engines.refresh()
        return self.request_metrics.page()


def engine_backend_of(request: Request) -> EngineBackend:
    backend = get_backend(request)
    assert isinstance(backend, EngineBackend)
    return backend

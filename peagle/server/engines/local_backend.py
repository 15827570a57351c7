"""LocalBackend: the backend that answers with engines in this process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request

from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.metrics import RequestMetrics
from peagle.server.http.backend import RouteHandler, check_model_name, get_backend
from peagle.server.http.drain import Drain
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair


@dataclass(slots=True)
class LocalBackend:
    settings: ServerSettings
    route_handlers: Mapping[str, RouteHandler]
    engines: EnginePool
    drain: Drain = field(init=False)
    response_counts: ResponseCounts = field(init=False)
    request_metrics: RequestMetrics = field(init=False)
    model_name: str = field(init=False)
    open_streams: int = 0  # Answers that are being sent chunk by chunk.

    def __post_init__(self) -> None:
        self.model_name = self.settings.model_names[0]
        self.drain = Drain(self.settings.drain_seconds)
        self.engines.grammar_queue.check_accepting = self.drain.check_accepting
        self.response_counts = ResponseCounts(self.model_name)
        self.request_metrics = RequestMetrics(self.model_name, self.engines, self.response_counts)

    def require(self, model: str | None) -> "LoadedPair":
        """The loaded pair, if the server accepts a request for the model of this name."""
        self.drain.check_accepting()
        check_model_name(model, self.settings.model_names)
        return self.engines.require_ready()

    @property
    def is_healthy(self) -> bool:
        return (
            self.engines.state == "ready"
            and self.engines.driver.alive
            and not self.engines.stalled
            and not self.drain.is_draining
        )

    @property
    def unavailable_reason(self) -> str:
        return self.engines.unavailable_reason

    @property
    def context(self) -> int:
        return self.engines.context

    async def start(self, on_failure: Callable[[str], None]) -> None:
        self.engines.on_failure = on_failure
        self.engines.start()

    async def close(self) -> None:
        self.engines.close()

    async def status(self) -> dict[str, Any]:
        engines = self.engines
        return {
            "model": self.model_name,
            "state": engines.state,
            "restarts": engines.restarts,
            "heartbeat_age": round(engines.heartbeat_age, 3),
            "scorings": engines.scorings,
            "methods": list(engines.methods),
            "method": engines.key.method,
            "k": engines.key.k,
            "engines": engines.status(),
        }

    async def metrics(self) -> bytes:
        return self.request_metrics.page()


def local_backend_of(request: Request) -> LocalBackend:
    backend = get_backend(request)
    assert isinstance(backend, LocalBackend)
    return backend

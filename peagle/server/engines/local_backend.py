"""Engines in this process, and what every handler needs of them: the settings, the drain, the histograms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request

from peagle.server.engines.engine_pool import ServerEngines
from peagle.server.engines.metrics import RequestMetrics
from peagle.server.http.backend import Handler, check_name
from peagle.server.http.drain import Drain
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair


@dataclass(slots=True)
class LocalBackend:
    settings: ServerSettings
    engines: ServerEngines
    drain: Drain
    replies: ResponseCounts
    measured: RequestMetrics
    model: str = field(init=False)
    streams: int = 0  # answers that are being sent as they grow

    def __post_init__(self) -> None:
        self.model = self.settings.model_names[0]

    @classmethod
    def of(cls, settings: ServerSettings, engines: ServerEngines | None = None) -> "LocalBackend":
        engines, model = engines or ServerEngines(settings), settings.model_names[0]
        replies = ResponseCounts(model)
        return cls(
            settings,
            engines,
            Drain(settings.drain_seconds),
            replies,
            RequestMetrics(model, engines, replies),
        )

    def require(self, model: str | None) -> "LoadedPair":
        """The pair, if a new request may come in and calls the model by its name, or by none."""
        self.drain.check()
        check_name(model, self.settings.model_names)
        return self.engines.require_ready()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        from peagle.server.openai.chat import chat
        from peagle.server.openai.completions import complete
        from peagle.server.openai.tokenize import detokenize, tokenize

        return {"chat": chat, "complete": complete, "tokenize": tokenize, "detokenize": detokenize}

    @property
    def healthy(self) -> bool:
        return self.engines.state == "ready" and self.engines.driver.alive and not self.drain.begun

    @property
    def reason(self) -> str:
        return self.engines.reason

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
        method, k = engines.key
        about = {"model": self.model, "state": engines.state, "restarts": engines.restarts}
        return about | {
            "methods": list(engines.methods),
            "method": method,
            "k": k,
            "engines": engines.status(),
        }

    async def metrics(self) -> bytes:
        return self.measured.page()


def local_backend_of(request: Request) -> LocalBackend:
    found = request.app.state.front
    assert isinstance(found, LocalBackend)
    return found

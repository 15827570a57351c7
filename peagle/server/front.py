"""What every handler needs: the settings, the engines, the drain, the histograms."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from peagle.errors import nearest
from peagle.server.drain import Drain
from peagle.server.engines import Engines
from peagle.server.errors import ApiError
from peagle.server.metrics import Measured
from peagle.server.settings import Settings

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair


@dataclass(slots=True)
class Front:
    settings: Settings
    engines: Engines
    drain: Drain
    measured: Measured
    model: str = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.settings.model_names[0]

    @classmethod
    def of(cls, settings: Settings, engines: Engines | None = None) -> "Front":
        engines = engines or Engines(settings)
        return cls(settings, engines, Drain(settings.drain_seconds), Measured(settings.model_names[0], engines))

    def require(self, model: str | None) -> "LoadedPair":
        """The pair, if a new request may come in and calls the model by its name, or by none."""
        self.drain.check()
        names = self.settings.model_names
        if model and model not in names:
            close = nearest(model, list(names))
            raise ApiError(404, f"there is no model {model!r} here: use {', '.join(map(repr, names))}.{close}", "model")
        return self.engines.require_ready()

    @property
    def healthy(self) -> bool:
        return self.engines.state == "ready" and self.engines.driver.alive and not self.drain.begun


def front_of(request: Request) -> Front:
    found = request.app.state.front
    assert isinstance(found, Front)
    return found

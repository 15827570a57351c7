"""Interface of what answers requests: engines of this package, or vLLM."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastapi import Request, Response

from peagle.errors import did_you_mean
from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.http.schema import MAX_NAME_CHARS
from peagle.server.settings import ServerSettings

RouteHandler = Callable[[Request, dict[str, Any]], Awaitable[Response]]


class Backend(Protocol):
    """EngineBackend sends requests to engine processes; Gateway relays them to vLLM."""

    settings: ServerSettings
    drain: Drain
    response_counts: ResponseCounts
    model_name: str

    @property
    def route_handlers(self) -> Mapping[str, RouteHandler]:
        """The handlers by the names in http/app.py."""

    @property
    def is_healthy(self) -> bool: ...

    @property
    def unavailable_reason(self) -> str:
        """Why requests cannot be answered now."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its answer; 0 until it is known."""

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """Start loading the model.

        `on_failure` is called with the reason, from any thread, if the model can never be served.
        """

    async def close(self) -> None: ...

    async def status(self) -> dict[str, Any]: ...

    async def metrics(self) -> bytes: ...


def get_backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


def check_model_name(model: Any, names: tuple[str, ...]) -> None:
    """Check the `model` of a request: one of `names`, or empty."""
    if model is not None and (not isinstance(model, str) or len(model) > MAX_NAME_CHARS):
        raise ApiError(
            400, f"model must be a string of at most {MAX_NAME_CHARS} characters", "model"
        )
    if model and model not in names:
        suggestion = did_you_mean(model, list(names))
        known = ", ".join(map(repr, names))
        raise ApiError(404, f"there is no model {model!r} here: use {known}.{suggestion}", "model")

"""What the application needs of whoever answers: engines in this process (front.py), or workers (gateway.py)."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastapi import Request, Response

from peagle.errors import nearest
from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.http.schema import MAX_NAME_CHARS
from peagle.server.settings import ServerSettings

Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]


class Backend(Protocol):
    settings: ServerSettings
    drain: Drain
    replies: ResponseCounts
    model: str

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Of chat, complete, tokenize and detokenize."""

    @property
    def healthy(self) -> bool: ...

    @property
    def reason(self) -> str:
        """Why it cannot answer now."""

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer; 0: not known yet."""

    async def start(self, on_failure: Callable[[str], None]) -> None:
        """`on_failure`: told, from any thread, that what was asked for cannot be served at all."""

    async def close(self) -> None: ...

    async def status(self) -> dict[str, Any]: ...

    async def metrics(self) -> bytes: ...


def backend_of(request: Request) -> Backend:
    found: Backend = request.app.state.front
    return found


def check_name(model: Any, names: tuple[str, ...]) -> None:
    """A request calls the model by one of its names, or by none."""
    if model is not None and (not isinstance(model, str) or len(model) > MAX_NAME_CHARS):
        raise ApiError(400, f"model must be a string of at most {MAX_NAME_CHARS} characters", "model")
    if model and model not in names:
        close = nearest(model, list(names))
        raise ApiError(
            404,
            f"there is no model {model!r} here: use {', '.join(map(repr, names))}.{close}",
            "model",
        )

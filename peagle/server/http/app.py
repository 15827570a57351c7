"""The application: which path does what."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from peagle import __version__
from peagle.server.http.auth import Auth
from peagle.server.http.backend import Backend, Handler, backend_of
from peagle.server.http.errors import ApiError, on_api_error, on_error, on_http_error
from peagle.server.http.limits import read_object
from peagle.server.http.logs import Requests
from peagle.server.http.origins import Origins
from peagle.server.http.schema import (
    MAX_NAME_CHARS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from peagle.server.http.sse import Gone

PAGE = Path(__file__).parents[1] / "page"
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
STARTED = int(time.time())


def build(front: Backend, on_failure: Callable[[str], None] = lambda reason: None) -> ASGIApp:
    """What a web server runs. Whoever answers is started with it and closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await front.start(on_failure)
        yield
        await front.close()

    app = FastAPI(
        title="peagle",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            Gone: on_gone,
            Exception: on_error,
        },
    )
    app.state.front = front
    add_routes(app, front.handlers)
    describe(app)
    return Requests(
        Origins(Auth(app, front.settings.api_keys), front.settings), front.drain, front.replies
    )


def add_routes(app: FastAPI, handlers: Mapping[str, Handler]) -> None:
    for path, name, kind in (
        ("/v1/chat/completions", "chat", ChatRequest),
        ("/v1/completions", "complete", CompletionRequest),
        ("/tokenize", "tokenize", TokenizeRequest),
        ("/detokenize", "detokenize", DetokenizeRequest),
    ):
        app.post(path, name=name, openapi_extra=body_of(kind), responses=ERRORS)(
            reading(handlers[name])
        )
    app.post(
        "/invocations",
        name="invoke",
        openapi_extra=body_of(ChatRequest, CompletionRequest),
        responses=ERRORS,
    )(reading(invoking(handlers), any_type=True))
    for path in ("/health", "/ping"):
        app.get(path, name=path[1:], responses={503: ERRORS[503]})(health)
        app.post(path, include_in_schema=False)(health)
    app.get("/v1/models")(models)
    app.get("/v1/models/{name:path}", responses=ERRORS)(model)
    app.get("/v1/peagle/status")(status)
    app.get("/version")(version)
    app.get("/metrics")(metrics)
    app.get("/", include_in_schema=False)(page)
    app.mount("/page", Page(directory=PAGE, check_dir=False))


def reading(handler: Handler, any_type: bool = False) -> Callable[[Request], Awaitable[Response]]:
    async def read(request: Request) -> Response:
        how = backend_of(request).settings
        return await handler(
            request, await read_object(request, how.max_body, how.body_timeout, any_type)
        )

    return read


def invoking(handlers: Mapping[str, Handler]) -> Handler:
    async def invoke(request: Request, body: dict[str, Any]) -> Response:
        """SageMaker's: chat or completion, by what the body holds."""
        if "messages" in body:
            return await handlers["chat"](request, body)
        if "prompt" in body:
            return await handlers["complete"](request, body)
        raise ApiError(400, "the body holds neither messages (chat) nor prompt (completion)")

    return invoke


async def health(request: Request) -> Response:
    """200: the model is there and answers."""
    front = backend_of(request)
    if front.healthy:
        return Response(status_code=200)
    reason = "the server is shutting down" if front.drain.begun else front.reason
    raise ApiError(503, reason, retry_after=1)


async def models(request: Request) -> dict[str, Any]:
    front = backend_of(request)
    return {"object": "list", "data": [card(front, name) for name in front.settings.model_names]}


async def model(request: Request, name: str) -> dict[str, Any]:
    front = backend_of(request)
    if name not in front.settings.model_names:
        raise ApiError(404, f"there is no model {name[:MAX_NAME_CHARS]!r} here", "model")
    return card(front, name)


def card(front: Backend, name: str) -> dict[str, Any]:
    context = front.context or None
    about = {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "peagle",
        "parent": None,
    }
    return about | {"root": front.model, "max_model_len": context}


async def status(request: Request) -> dict[str, Any]:
    """What the engines do: K and why, queue, pages, acceptance by position."""
    return await backend_of(request).status()


async def version() -> dict[str, str]:
    return {"version": __version__}


async def metrics(request: Request) -> Response:
    return Response(
        await backend_of(request).metrics(), headers={"content-type": CONTENT_TYPE_LATEST}
    )


async def page() -> Response:
    index = PAGE / "index.html"
    if not index.is_file():
        raise ApiError(404, "there is no page here: ask /v1/chat/completions")
    return FileResponse(
        index, headers={"content-security-policy": POLICY, "cache-control": "no-cache"}
    )


class Page(StaticFiles):
    """A newer server's page is seen at once: browsers ask whether theirs is still the same."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


async def on_gone(_: Request, __: Exception) -> Response:
    """Nobody reads it; for the log."""
    return Response(status_code=499)


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "What was asked for cannot be had; the message says why.",
        401: "No key, or a wrong one.",
        403: "A page of another origin.",
        404: "No such model.",
        408: "The body did not come.",
        413: "The body is too long.",
        415: "Not JSON.",
        429: "The queue is full: try again.",
        503: "Loading, restarting or shutting down.",
        504: "It took too long.",
    }.items()
}


def body_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Bodies are read by us (limits.py), so we describe them."""
    refs = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Adds the bodies' schemas to the OpenAPI document."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        known = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            known.update(schema.pop("$defs", {}))
            known[kind.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]

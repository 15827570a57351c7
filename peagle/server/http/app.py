"""The ASGI application: the routes and the middleware around them."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from peagle import __version__
from peagle.server.http.auth import Auth
from peagle.server.http.backend import Backend, RouteHandler, get_backend
from peagle.server.http.errors import ApiError, on_api_error, on_error, on_http_error
from peagle.server.http.limits import MAX_LARGE_BODIES, MIN_BODY_BUDGET, BodyBudget, read_object
from peagle.server.http.openapi import ERROR_RESPONSES, add_body_schemas, describe_body
from peagle.server.http.origins import Origins
from peagle.server.http.request_log import RequestLog
from peagle.server.http.schema import (
    MAX_NAME_CHARS,
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    DrafterRequest,
    MessageRequest,
    RequestModel,
    ResponseRequest,
    TokenizeRequest,
)
from peagle.server.http.sse import ClientDisconnected

PAGE_FOLDER = Path(__file__).parents[1] / "page"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STARTED = int(time.time())  # Unix time; the `created` field of the models


# Path, name of the handler, and body.
POST_ROUTES: tuple[tuple[str, str, type[RequestModel]], ...] = (
    ("/v1/chat/completions", "chat", ChatRequest),
    ("/v1/completions", "complete", CompletionRequest),
    ("/v1/responses", "create_response", ResponseRequest),
    ("/v1/messages", "create_message", MessageRequest),
    ("/v1/messages/count_tokens", "count_tokens", CountTokensRequest),
    ("/tokenize", "tokenize", TokenizeRequest),
    ("/detokenize", "detokenize", DetokenizeRequest),
    ("/v1/peagle/drafter", "change_drafter", DrafterRequest),
)


def build_app(backend: Backend, on_failure: Callable[[str], None] = lambda reason: None) -> ASGIApp:
    """Build the application that a web server runs.

    Its lifespan starts and closes the backend.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backend.start(on_failure)
        yield
        await backend.close()

    app = FastAPI(
        title="peagle",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            ClientDisconnected: on_disconnect,
            Exception: on_error,
        },
    )
    app.state.backend = backend
    max_bytes = max(MIN_BODY_BUDGET, MAX_LARGE_BODIES * backend.settings.max_body_bytes)
    budget = BodyBudget(backend.settings.share_of_front(max_bytes))
    add_routes(app, backend.route_handlers, budget)
    add_body_schemas(app, tuple(schema for _, _, schema in POST_ROUTES))
    guarded = Origins(Auth(app, backend.settings.api_keys), backend.settings)
    return RequestLog(guarded, backend.drain, backend.response_counts)


def add_routes(app: FastAPI, handlers: Mapping[str, RouteHandler], budget: BodyBudget) -> None:
    for path, name, schema in POST_ROUTES:
        endpoint = with_body(handlers[name], budget)
        body = describe_body(schema)
        app.post(path, name=name, openapi_extra=body, responses=ERROR_RESPONSES)(endpoint)
    app.post(
        "/invocations",
        name="invoke",
        openapi_extra=describe_body(ChatRequest, CompletionRequest),
        responses=ERROR_RESPONSES,
    )(with_body(invocation_handler(handlers), budget, any_content_type=True))
    for method, name in (("GET", "retrieve_response"), ("DELETE", "delete_response")):
        app.add_api_route(
            "/v1/responses/{response_id}",
            without_body(handlers[name]),
            methods=[method],
            name=name,
            responses=ERROR_RESPONSES,
        )
    for path in ("/health", "/ping"):
        app.get(path, name=path[1:], responses={503: ERROR_RESPONSES[503]})(health)
        app.post(path, include_in_schema=False)(health)
    app.get("/v1/models")(models)
    app.get("/v1/models/{name:path}", responses=ERROR_RESPONSES)(model)
    app.get("/v1/peagle/status")(status)
    app.get("/v1/peagle/drafter", name="show_drafter", responses=ERROR_RESPONSES)(
        without_body(handlers["show_drafter"])
    )
    app.get("/version")(version)
    app.get("/metrics")(metrics)
    app.get("/", include_in_schema=False)(page)
    app.mount("/page", PageFiles(directory=PAGE_FOLDER, check_dir=False))


def with_body(
    handler: RouteHandler, budget: BodyBudget, any_content_type: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads the JSON body and calls `handler` with it."""

    async def read(request: Request) -> Response:
        settings = get_backend(request).settings
        body = await read_object(request, settings, budget, any_content_type)
        return await handler(request, body)

    return read


def without_body(handler: RouteHandler) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        return await handler(request, {})

    return call


def invocation_handler(handlers: Mapping[str, RouteHandler]) -> RouteHandler:
    """Return the handler of SageMaker's /invocations: the body is a chat or a completion."""

    async def invoke(request: Request, body: dict[str, Any]) -> Response:
        if "messages" in body:
            return await handlers["chat"](request, body)
        if "prompt" in body:
            return await handlers["complete"](request, body)
        raise ApiError(400, "the body has neither messages (chat) nor prompt (completion)")

    return invoke


async def health(request: Request) -> Response:
    """200 if the model is loaded and answers requests, else 503."""
    backend = get_backend(request)
    if backend.is_healthy:
        return Response(status_code=200)
    draining = backend.drain.is_draining
    reason = "the server is shutting down" if draining else backend.unavailable_reason
    raise ApiError(503, reason, retry_after=1)


async def models(request: Request) -> dict[str, Any]:
    backend = get_backend(request)
    names = backend.settings.model_names
    return {"object": "list", "data": [model_card(backend, name) for name in names]}


async def model(request: Request, name: str) -> dict[str, Any]:
    backend = get_backend(request)
    if name not in backend.settings.model_names:
        raise ApiError(404, f"there is no model {name[:MAX_NAME_CHARS]!r} here", "model")
    return model_card(backend, name)


def model_card(backend: Backend, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "peagle",
        "parent": None,
        "root": backend.model_name,
        "max_model_len": backend.context or None,
    }


async def status(request: Request) -> dict[str, Any]:
    """State of the engines: K and its reason, queue, KV pages, acceptance by position."""
    return await get_backend(request).status()


async def version() -> dict[str, str]:
    return {"version": __version__}


async def metrics(request: Request) -> Response:
    text = await get_backend(request).metrics()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def page() -> Response:
    index = PAGE_FOLDER / "index.html"
    if not index.is_file():
        raise ApiError(404, "there is no web page here: use /v1/chat/completions")
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-cache"}
    return FileResponse(index, headers=headers)


class PageFiles(StaticFiles):
    """Files of the web page. Browsers revalidate them, so that an updated page shows at once."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Answer a client that has left: only the request log sees the status."""
    return Response(status_code=499)

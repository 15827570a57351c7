"""Errors as clients see them: one sentence, never a traceback.

The layout is OpenAI's; on the paths of Anthropic's API it is Anthropic's.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Engine processes know errors too, and start faster without web frameworks.
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from pydantic import ValidationError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_PATH = "/v1/messages"  # and below
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LENGTH_ERRORS = ("too_long", "too_short")  # Of pydantic, for lists.
MAX_FIELD_CHARS = 256  # Names of fields may come from the client.
INTERNAL_ERROR = "internal server error: the server's log has the details under this request's id"


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        """`param` is the field of the body at fault; `retry_after` is in seconds."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, default),
                "param": self.param,
                "code": self.status,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        error_type = ANTHROPIC_ERROR_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": error_type, "message": self.message}}

    def response(self, path: str = "") -> "JSONResponse":
        """The response to a request; `path` decides on the layout."""
        from fastapi.responses import JSONResponse

        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.anthropic_body if is_anthropic(path) else self.body
        return JSONResponse(body, self.status, headers)


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def engine_stopped() -> ApiError:
    """The error of an answer whose engine, or vLLM, has ended."""
    return ApiError(503, "the engine stopped during the answer: try again", retry_after=2)


def from_validation(error: "ValidationError") -> ApiError:
    """Convert pydantic's deepest error: in a union, that is the branch that matched best.

    A list of the wrong length has matched its branch, although its error is not deep.
    """
    details = error.errors(include_url=False, include_input=False, include_context=False)
    deepest = max(details, key=lambda detail: (detail["type"] in LENGTH_ERRORS, len(detail["loc"])))
    field = ".".join(str(part) for part in deepest["loc"] if is_field(part))
    field = field[:MAX_FIELD_CHARS]
    message = re.sub(r" or instance of \w+$", "", deepest["msg"].removeprefix("Value error, "))
    return ApiError(400, f"{field}: {message}" if field else message, field or None)


def is_field(part: int | str) -> bool:
    """Return whether it is a field or an index; pydantic also lists the branches of unions.

    Branches are types: built-in ones, or classes, whose names begin with a capital letter.
    """
    if isinstance(part, int):
        return True
    is_class = part[:1].isupper() or part in ("str", "int", "float", "bool")
    return part.isidentifier() and not is_class


async def on_api_error(request: "Request", error: Exception) -> "JSONResponse":
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def on_error(request: "Request", _: Exception) -> "JSONResponse":
    """Hide the details of an unexpected error; they are in the log."""
    return ApiError(500, INTERNAL_ERROR).response(request.url.path)


async def on_http_error(request: "Request", error: Exception) -> "JSONResponse":
    """Convert Starlette's own errors: unknown paths and methods."""
    from starlette.exceptions import HTTPException

    assert isinstance(error, HTTPException)
    route = f"{request.method} {request.url.path}"
    messages = {404: f"there is no {route}", 405: f"{route}: this method is not allowed"}
    message = messages.get(error.status_code) or str(error.detail)
    response = ApiError(error.status_code, message).response(request.url.path)
    response.headers.update(error.headers or {})
    return response

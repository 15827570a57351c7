"""What a client is told when something is wrong: OpenAI's layout, one sentence, never a traceback."""

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

TYPES = {
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


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = (
            status,
            message,
            param,
            retry_after,
        )

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }

    @property
    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


INTERNAL = "something went wrong on the server: its log tells more under this request's id"


def from_validation(error: ValidationError) -> ApiError:
    """The first of what pydantic found; of a union, the branch that got furthest."""
    found = max(
        error.errors(include_url=False, include_input=False, include_context=False),
        key=lambda e: len(e["loc"]),
    )
    where = ".".join(str(part) for part in found["loc"] if is_place(part))
    message = found["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}" if where else message, where or None)


def is_place(part: int | str) -> bool:
    """A field or an index; pydantic also names the branches of unions there."""
    return isinstance(part, int) or (
        part.isidentifier() and part not in ("str", "int", "float", "bool")
    )


async def on_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response


async def on_error(_: Request, __: Exception) -> JSONResponse:
    """Ours to repair: the log has it."""
    return ApiError(500, INTERNAL).response


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = {404: f"there is no {what}", 405: f"{what}: this method is not allowed"}.get(
        error.status_code
    )
    reply = ApiError(error.status_code, message or str(error.detail)).response
    reply.headers.update(error.headers or {})
    return reply

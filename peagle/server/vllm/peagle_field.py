"""The field `peagle` of a request to vLLM: it may only ask for what this server runs with."""

from typing import Any

from pydantic import ValidationError

from peagle.server.http.errors import ApiError, from_validation
from peagle.server.http.schema import Extension
from peagle.server.vllm.vllm_launch import VllmLaunch


def without_peagle_field(body: dict[str, Any], launch: VllmLaunch) -> dict[str, Any]:
    """Return the body for vLLM. ApiError: the field asks for something else."""
    if body.get("peagle") is None:
        return body
    try:
        extension = Extension.model_validate(body["peagle"])
    except ValidationError as error:
        raise from_validation(error) from error
    if extension.method not in (None, launch.method):
        raise ApiError(
            400,
            f"peagle.method {extension.method!r} is not served: this server has {launch.method}",
        )
    if extension.k not in (None, "auto", launch.k):
        raise ApiError(400, f"peagle.k {extension.k} is not supported: vLLM runs with K {launch.k}")
    rest = {name: value for name, value in body.items() if name != "peagle"}
    return with_token_counts(rest) if extension.trace and body.get("stream") else rest


def with_token_counts(body: dict[str, Any]) -> dict[str, Any]:
    """Ask for token counts in every chunk: they replace the trace of steps, which vLLM lacks."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        return body  # vLLM reports the error
    return body | {
        "stream_options": options | {"include_usage": True, "continuous_usage_stats": True}
    }

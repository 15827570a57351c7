"""Versions of vLLM: which one a deployment runs, and whether it can serve the pair."""

from peagle.core import Method
from peagle.errors import UserError

TESTED_VLLM = "0.32.0"  # the drafts of peagle were compared with those of this version
MIN_PARALLEL_VLLM = "0.16"  # the first version with parallel drafting
MIN_SAMPLING_VLLM = "0.25"  # the first version that verifies drafts correctly above temperature 0
RAY_VERSION = "2.60.0"
RAY_VLLM = "0.29.0"  # the vLLM that RAY_VERSION installs


def parse_version(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.removeprefix("v").split("."))
    except ValueError as error:
        raise UserError(
            f"`vllm` {version!r} is not a version: give one like {TESTED_VLLM}"
        ) from error


def choose_version(
    requested: str | None,
    minimum: str | None,
    method: Method,
    pair: str,
    default: str = TESTED_VLLM,
) -> str:
    """The requested version, else the default one; refused if it cannot serve the pair."""
    version = (requested or default).removeprefix("v")
    limits = (minimum, MIN_PARALLEL_VLLM if method == "p-eagle" else None)
    first = max((limit for limit in limits if limit), key=parse_version, default="0")
    if parse_version(version) < parse_version(first):
        raise UserError(
            f"{pair} needs vLLM {first} or later, but `vllm` is {version}: omit it to use {default}"
        )
    if version.count(".") != 2:
        raise UserError(
            f"`vllm` {version!r} does not name an image: give all three numbers, like {TESTED_VLLM}"
        )
    return version


def samples_incorrectly(version: str) -> bool:
    return parse_version(version) < parse_version(MIN_SAMPLING_VLLM)

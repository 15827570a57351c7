"""vLLM's versions: which one a deployment runs, and whether the pair can be served by it."""

from peagle.core import Method
from peagle.errors import UserError

TESTED = "0.32.0"  # every proposal of ours was compared with this one's
PARALLEL = "0.16"  # the first that drafts in parallel
RAY, RAYS = "2.60.0", "0.29.0"  # Ray, and the vLLM that this version of it installs
SAMPLING = "0.25"  # the first whose drafts are verified rightly at temperatures above 0


def numbers(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.removeprefix("v").split("."))
    except ValueError as error:
        raise UserError(f"--vllm {version!r} is no version: give one like {TESTED}") from error


def choose_version(
    wanted: str | None, gate: str | None, method: Method, pair: str, usual: str = TESTED
) -> str:
    """`wanted` if it serves the pair, else the usual one; never below the pair's gate."""
    version = (wanted or usual).removeprefix("v")
    first = max(
        (word for word in (gate, PARALLEL if method == "p-eagle" else None) if word),
        key=numbers,
        default="0",
    )
    if numbers(version) < numbers(first):
        raise UserError(
            f"{pair} needs vLLM {first} or later, --vllm is {version}: leave it out for {usual}"
        )
    if version.count(".") != 2:
        raise UserError(f"--vllm {version!r} names no image: give all three numbers, like {TESTED}")
    return version


def samples_wrongly(version: str) -> bool:
    return numbers(version) < numbers(SAMPLING)

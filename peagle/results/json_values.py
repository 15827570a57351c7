"""JSON values of a file that may have been edited by hand: what does not fit is None or empty."""

from collections.abc import Mapping
from math import isfinite
from typing import Any


def as_float(value: Any) -> float | None:
    """A finite number, or None. Files hold nulls, and Python's JSON reads NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if isfinite(number) else None


def as_int(value: Any) -> int | None:
    return None if as_float(value) is None else int(value)


def as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def as_floats(value: Any) -> tuple[float, ...] | None:
    """A list in which every item is a finite number."""
    if not isinstance(value, list):
        return None
    numbers = [number for item in value if (number := as_float(item)) is not None]
    return tuple(numbers) if len(numbers) == len(value) else None


def as_counts(value: Any) -> Mapping[int, int]:
    """Counts by number. JSON writes the numbers as text: {"7": 120}."""
    return {
        int(name): count
        for name, item in as_object(value).items()
        if name.isdecimal() and (count := as_int(item)) is not None
    }


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def printable(value: Any) -> Any:
    """The same JSON value with unpaired surrogates, which JSON can hold, as question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value

"""Figure: what a chart shows, as numbers and words. Nothing is drawn here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from peagle.report.words import amount, join_words

CLOSE_POINTS = 1 / 8  # of a natural logarithm, in both directions


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None  # ends of the error bar
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Line:
    label: str
    color: str  # a name of the palette, which also decides the marker
    points: tuple[Point, ...]
    dashed: bool = False
    joined: bool = True  # False: markers only


@dataclass(frozen=True)
class Figure:
    name: str  # of its file
    title: str
    xlabel: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False  # both axes
    baseline: float | None = None  # a horizontal line
    ticks: tuple[float, ...] = ()  # of the x axis
    note: str = ""

    @property
    def description(self) -> str:
        """The main numbers, for readers who cannot see the picture."""
        lines = " ".join(describe_line(line) for line in self.lines)
        return f"{self.ylabel} against {self.xlabel}. {lines}"


def describe_line(line: Line) -> str:
    """The first, the highest and the last point."""
    points = [line.points[0], max(line.points, key=lambda p: p.y), line.points[-1]]
    values = [
        f"{amount(p.y)} at {amount(p.x, None if p.x % 1 else 0)}" for p in dict.fromkeys(points)
    ]
    return f"{line.label}: {join_words(values)}."


def hide_close_texts(points: Sequence[Point]) -> list[Point]:
    """The points without the texts that would overlap with the text before."""
    result: list[Point] = []
    last: Point | None = None
    for point in points:
        if last is not None and log_distance(point, last) < CLOSE_POINTS:
            result.append(replace(point, text=""))
        else:
            result.append(point)
            last = point
    return result


def log_distance(a: Point, b: Point) -> float:
    return max(abs(log(a.x / b.x)), abs(log(a.y / b.y)))


def spaced(values: list[int], count: int) -> list[int]:
    """At most `count` values: the first, the last, and some evenly between."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def slug(text: str) -> str:
    """A safe part of a file name, whatever a result file calls its method or machine."""
    letters = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()
    )
    return "-".join(filter(None, letters.split("-")))[:40] or "x"

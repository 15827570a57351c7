"""What each chart shows, as numbers and words: nothing is drawn here."""

from dataclasses import dataclass, replace
from math import log

from peagle.report.grid import Grid, per_user, ratio
from peagle.report.palette import SLOTS
from peagle.report.words import TREE, amount, form_label, listed, method_label
from peagle.results.runs import ResultCell, number, sequence

POSITIONS = "spec_decode_per_position_acceptance_rates"
LENGTH = "spec_decode_acceptance_length"


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Line:
    label: str
    color: str  # a name of the palette; it decides the marker too
    points: tuple[Point, ...]
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Figure:
    name: str  # of its file
    title: str
    xlabel: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False  # both axes
    baseline: float | None = None
    ticks: tuple[float, ...] = ()
    note: str = ""

    @property
    def words(self) -> str:
        """The main numbers, for who does not see the picture."""
        return f"{self.ylabel} against {self.xlabel}. " + " ".join(
            self.told(line) for line in self.lines
        )

    def told(self, line: Line) -> str:
        ends = [line.points[0], max(line.points, key=lambda p: p.y), line.points[-1]]
        shown = [
            f"{amount(p.y)} at {amount(p.x, None if p.x % 1 else 0)}" for p in dict.fromkeys(ends)
        ]
        return f"{line.label}: {listed(shown)}."


def figures(grid: Grid) -> list[Figure]:
    """Those for which there is something to show."""
    main = "p-eagle" if "p-eagle" in grid.drafting else (grid.drafting or [""])[-1]
    made = [
        over_none(grid, main),
        over_eagle3(grid, main),
        pareto(grid),
        positions(grid, main),
        lengths(grid),
    ]
    made += [by_k(grid, method) for method in reversed(grid.drafting)]
    return [figure for figure in made if figure.lines]


def colors(grid: Grid, method: str) -> dict[int | str, str]:
    """A color a K, the same in every chart."""
    fixed = [k for k in grid.ks(method) if k != "auto"]
    return {k: SLOTS[i % len(SLOTS)] for i, k in enumerate(fixed)} | {"auto": "ink"}


def shade(method: str) -> str:
    """A color a method, where each has one line."""
    return method if method in ("none", "eagle3") else "s3" if TREE in method else "s1"


def line(name: str, color: str, points: list[Point], **how: bool) -> list[Line]:
    return [Line(name, color, tuple(points), **how)] if points else []


def ratios(cells: list[ResultCell | None], bases: list[ResultCell | None]) -> list[Point]:
    found = [(c, ratio(c, base)) for c, base in zip(cells, bases, strict=True) if c]
    return [Point(c.concurrency, r.value, r.low, r.high) for c, r in found if r]


def over(grid: Grid, main: str, bases: list[ResultCell | None]) -> list[Line]:
    """A line a K of the main method."""
    lines = []
    for k, color in colors(grid, main).items():
        cells = [grid.at(main, k, c) for c in grid.concurrencies]
        lines += line(form_label(main, k), color, ratios(cells, bases))
    return lines


def over_none(grid: Grid, main: str) -> Figure:
    bases = [grid.none(c) for c in grid.concurrencies]
    lines = over(grid, main, bases)
    for method in (method for method in grid.drafting if method != main):
        best = [grid.best(c, method) for c in grid.concurrencies]
        lines += line(
            f"{method_label(method)}, best K", shade(method), ratios(best, bases), dashed=True
        )
    return speed_up("speedup", "Speed-up over none", "times none's tokens/s", grid, lines)


def over_eagle3(grid: Grid, main: str) -> Figure:
    bases = [grid.best(c, "eagle3") for c in grid.concurrencies]
    lines = over(grid, main, bases) if main != "eagle3" else []
    return speed_up(
        "over-eagle3",
        "Speed-up over EAGLE-3 at its best K",
        "times EAGLE-3's tokens/s",
        grid,
        lines,
    )


def speed_up(name: str, title: str, ylabel: str, grid: Grid, lines: list[Line]) -> Figure:
    ticks = tuple(float(c) for c in grid.concurrencies)
    note = (
        "Bars: worst run of one against best run of the other."
        if spread_known(grid)
        else "One run a cell."
    )
    return Figure(
        name,
        title,
        "requests at a time",
        ylabel,
        tuple(lines),
        baseline=1.0,
        ticks=ticks,
        note=note,
    )


def spread_known(grid: Grid) -> bool:
    return any(cell.spread() for cell in grid.measured)


def pareto(grid: Grid) -> Figure:
    lines = []
    for method in grid.methods:
        cells = [cell for cell in grid.measured if cell.method == method]
        lines += line(method_label(method), shade(method), placed(cells), joined=False)
    front = apart([Point(p.x, p.y, text=front_text(c)) for c in grid.front() for p in placed([c])])
    lines += line("Pareto front", "ink", front) if len(front) > 1 else []
    title, x, y = (
        "Throughput against speed for one user",
        "tokens/s of one user",
        "tokens/s of all together",
    )
    return Figure(
        "pareto",
        title,
        x,
        y,
        tuple(lines),
        log=True,
        note="Ringed: no other cell is better in both. c: requests at a time.",
    )


def apart(points: list[Point]) -> list[Point]:
    """Without the texts that would lie on the one before: points within an eighth of it in both directions."""
    told, last = [], None
    for point in points:
        close = (
            last is not None and max(abs(log(point.x / last.x)), abs(log(point.y / last.y))) < 1 / 8
        )
        told.append(replace(point, text="") if close else point)
        last = last if close else point
    return told


def front_text(cell: ResultCell) -> str:
    return f"c={cell.concurrency}" if cell.method == "none" else f"K={cell.k}, c={cell.concurrency}"


def placed(cells: list[ResultCell]) -> list[Point]:
    found = [(per_user(cell), cell) for cell in cells]
    return [Point(x, cell.throughput or 0.0, *cell.interval()) for x, cell in found if x]


def positions(grid: Grid, main: str) -> Figure:
    """Rates hardly depend on concurrency: their mean over it."""
    lines = []
    for k, color in colors(grid, main).items():
        lines += line(form_label(main, k), color, mean_positions(grid, main, k))
    for method in (method for method in grid.drafting if method != main):
        longest = [k for k in grid.ks(method) if k != "auto"][-1:]
        for k in longest:
            points = mean_positions(grid, method, k)
            lines += line(form_label(method, k), shade(method), points, dashed=True)
    longest_line = max((len(found.points) for found in lines), default=0)
    ticks = tuple(float(i + 1) for i in range(longest_line))
    title, y = "Accepted drafts, by position", "share of drafts accepted"
    return Figure("positions", title, "position in the draft", y, tuple(lines), ticks=ticks)


def mean_positions(grid: Grid, method: str, k: int | str) -> list[Point]:
    cells = [cell for cell in grid.measured if (cell.method, cell.k) == (method, k)]
    rows = [[number(rate) for rate in sequence(cell.raw.get(POSITIONS))] for cell in cells]
    points = []
    for i in range(max(map(len, rows), default=0)):
        rates = [row[i] for row in rows if i < len(row)]
        known = [rate for rate in rates if rate is not None]
        if known:
            points.append(Point(i + 1, sum(known) / len(known), min(known), max(known)))
    return points


def fixed_ks(grid: Grid, method: str) -> list[int]:
    return [k for k in grid.ks(method) if isinstance(k, int) and k > 0]


def lengths(grid: Grid) -> Figure:
    lines = []
    for method in reversed(grid.drafting):
        points = []
        for k in fixed_ks(grid, method):
            cells = [cell for cell in grid.measured if (cell.method, cell.k) == (method, k)]
            known = [value for cell in cells if (value := cell.number(LENGTH)) is not None]
            points += [Point(k, sum(known) / len(known), min(known), max(known))] if known else []
        lines += line(method_label(method), shade(method), points, dashed=shade(method) != "s1")
    ticks = tuple(sorted({point.x for found in lines for point in found.points}))
    title, y = "Acceptance length against K", "tokens per target pass"
    return Figure("lengths", title, "K", y, tuple(lines) if len(ticks) > 1 else (), ticks=ticks)


def by_k(grid: Grid, method: str) -> Figure:
    """How throughput changes with K, at up to five concurrencies; relative to none, so that all fit one axis."""
    lines = []
    for concurrency, color in zip(spaced(grid.concurrencies, 5), SLOTS, strict=False):
        points = []
        for k in fixed_ks(grid, method):
            cell = grid.at(method, k, concurrency)
            found = ratio(cell, grid.none(concurrency)) if cell else None
            points += [Point(k, found.value, found.low, found.high)] if found else []
        lines += line(f"{concurrency} at a time", color, points)
    ticks = tuple(sorted({point.x for found in lines for point in found.points}))
    title = f"{method_label(method)}: throughput against K"
    shown = tuple(lines) if len(ticks) > 1 else ()
    return Figure(
        f"k-{slug(method)}", title, "K", "times none's tokens/s", shown, baseline=1.0, ticks=ticks
    )


def spaced(values: list[int], most: int) -> list[int]:
    """First, last, and evenly between."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def slug(text: str) -> str:
    """Safe in a file's name, whatever a result file calls its method or machine."""
    kept = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()
    )
    return "-".join(filter(None, kept.split("-")))[:40] or "x"

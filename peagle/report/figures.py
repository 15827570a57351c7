"""The figures of a report: speed-ups, Pareto front, acceptance, throughput by K."""

from collections.abc import Sequence

from peagle.report.figure import Figure, Line, Point, hide_close_texts, slug, spaced
from peagle.report.grid import Grid, throughput_ratio
from peagle.report.palette import SERIES_COLORS
from peagle.report.words import TREE, draft_label, method_label
from peagle.results.cell import BenchCell

MAX_CONCURRENCIES_PER_CHART = 5


def figures(grid: Grid) -> list[Figure]:
    """Those for which there is something to show."""
    main = "p-eagle" if "p-eagle" in grid.drafting else (grid.drafting or [""])[-1]
    candidates = [
        speedup_over_none(grid, main),
        speedup_over_eagle3(grid, main),
        pareto(grid),
        acceptance_by_position(grid, main),
        acceptance_by_k(grid),
        *(throughput_by_k(grid, method) for method in reversed(grid.drafting)),
    ]
    return [figure for figure in candidates if figure.lines]


def k_colors(grid: Grid, method: str) -> dict[int | str, str]:
    """A color for each K, the same in every chart."""
    fixed = [k for k in grid.ks(method) if k != "auto"]
    colors: dict[int | str, str] = {
        k: SERIES_COLORS[i % len(SERIES_COLORS)] for i, k in enumerate(fixed)
    }
    return colors | {"auto": "ink"}


def method_color(method: str) -> str:
    """A color for each method, where a method is a single line."""
    if method == "ngram":
        return "s0"
    return method if method in ("none", "eagle3") else "s3" if TREE in method else "s1"


def make_lines(
    label: str, color: str, points: Sequence[Point], dashed: bool = False, joined: bool = True
) -> list[Line]:
    """One line, or none without points."""
    return [Line(label, color, tuple(points), dashed, joined)] if points else []


def ratio_points(
    cells: Sequence[BenchCell | None], bases: Sequence[BenchCell | None]
) -> list[Point]:
    points = []
    for cell, base in zip(cells, bases, strict=True):
        ratio = throughput_ratio(cell, base) if cell is not None else None
        if cell is not None and ratio is not None:
            points.append(Point(cell.concurrency, ratio.value, ratio.low, ratio.high))
    return points


def ratio_lines(grid: Grid, main: str, bases: Sequence[BenchCell | None]) -> list[Line]:
    """A line for each K of the main method."""
    lines = []
    for k, color in k_colors(grid, main).items():
        cells = [grid.at(main, k, c) for c in grid.concurrencies]
        lines += make_lines(draft_label(main, k), color, ratio_points(cells, bases))
    return lines


def speedup_over_none(grid: Grid, main: str) -> Figure:
    bases = [grid.none(c) for c in grid.concurrencies]
    lines = ratio_lines(grid, main, bases)
    for method in (method for method in grid.drafting if method != main):
        best = [grid.best(c, method) for c in grid.concurrencies]
        label = f"{method_label(method)}, best K"
        lines += make_lines(label, method_color(method), ratio_points(best, bases), dashed=True)
    return speedup_figure("speedup", "Speed-up over none", "times none's tokens/s", grid, lines)


def speedup_over_eagle3(grid: Grid, main: str) -> Figure:
    bases = [grid.best(c, "eagle3") for c in grid.concurrencies]
    lines = ratio_lines(grid, main, bases) if main != "eagle3" else []
    title = "Speed-up over EAGLE-3 at its best K"
    return speedup_figure("over-eagle3", title, "times EAGLE-3's tokens/s", grid, lines)


def speedup_figure(name: str, title: str, ylabel: str, grid: Grid, lines: list[Line]) -> Figure:
    if any(cell.spread for cell in grid.measured):
        note = "Bars: worst run of one against best run of the other."
    else:
        note = "One run per cell."
    return Figure(
        name,
        title,
        "requests at a time",
        ylabel,
        tuple(lines),
        baseline=1.0,
        ticks=tuple(float(c) for c in grid.concurrencies),
        note=note,
    )


def pareto(grid: Grid) -> Figure:
    lines = []
    for method in grid.methods:
        cells = [cell for cell in grid.measured if cell.variant == method]
        points = [point for cell in cells for point in throughput_points(cell)]
        lines += make_lines(method_label(method), method_color(method), points, joined=False)
    front = hide_close_texts(
        [
            Point(point.x, point.y, text=front_text(cell))
            for cell in grid.pareto_front()
            for point in throughput_points(cell)
        ]
    )
    lines += make_lines("Pareto front", "ink", front) if len(front) > 1 else []
    return Figure(
        "pareto",
        "Throughput against speed for one user",
        "tokens/s of one user",
        "tokens/s of all together",
        tuple(lines),
        log=True,
        note="Ringed: no other cell is better in both. c: requests at a time.",
    )


def front_text(cell: BenchCell) -> str:
    if cell.variant == "none":
        return f"c={cell.concurrency}"
    return f"K={cell.k}, c={cell.concurrency}"


def throughput_points(cell: BenchCell) -> list[Point]:
    """One point, or none where the user throughput is not known."""
    if not cell.user_throughput:
        return []
    return [Point(cell.user_throughput, cell.throughput or 0.0, *cell.interval)]


def acceptance_by_position(grid: Grid, main: str) -> Figure:
    """Rates hardly depend on concurrency, so their mean over it is shown."""
    lines = []
    for k, color in k_colors(grid, main).items():
        lines += make_lines(draft_label(main, k), color, position_points(grid, main, k))
    for method in (method for method in grid.drafting if method != main):
        for k in [k for k in grid.ks(method) if k != "auto"][-1:]:
            points = position_points(grid, method, k)
            lines += make_lines(draft_label(method, k), method_color(method), points, dashed=True)
    max_positions = max((len(line.points) for line in lines), default=0)
    return Figure(
        "positions",
        "Accepted drafts, by position",
        "position in the draft",
        "share of drafts accepted",
        tuple(lines),
        ticks=tuple(float(i + 1) for i in range(max_positions)),
    )


def cells_of_form(grid: Grid, method: str, k: int | str) -> list[BenchCell]:
    return [cell for cell in grid.measured if (cell.variant, cell.k) == (method, k)]


def mean_points(x: float, values: Sequence[float]) -> list[Point]:
    """The mean with its range, or nothing without values."""
    return [Point(x, sum(values) / len(values), min(values), max(values))] if values else []


def position_points(grid: Grid, method: str, k: int | str) -> list[Point]:
    rows = [
        cell.spec_decode_per_position_acceptance_rates or ()
        for cell in cells_of_form(grid, method, k)
    ]
    points = []
    for i in range(max(map(len, rows), default=0)):
        points += mean_points(i + 1, [row[i] for row in rows if i < len(row)])
    return points


def fixed_ks(grid: Grid, method: str) -> list[int]:
    return [k for k in grid.ks(method) if isinstance(k, int) and k > 0]


def acceptance_by_k(grid: Grid) -> Figure:
    lines = []
    for method in reversed(grid.drafting):
        points = []
        for k in fixed_ks(grid, method):
            lengths = [
                cell.spec_decode_acceptance_length
                for cell in cells_of_form(grid, method, k)
                if cell.spec_decode_acceptance_length is not None
            ]
            points += mean_points(k, lengths)
        color = method_color(method)
        lines += make_lines(method_label(method), color, points, dashed=color != "s1")
    return k_figure("lengths", "Acceptance length against K", "tokens per target pass", lines)


def throughput_by_k(grid: Grid, method: str) -> Figure:
    """Throughput against K at up to five concurrencies, relative to none to fit one axis."""
    lines = []
    concurrencies = spaced(grid.concurrencies, MAX_CONCURRENCIES_PER_CHART)
    for concurrency, color in zip(concurrencies, SERIES_COLORS, strict=False):
        points = []
        for k in fixed_ks(grid, method):
            cell = grid.at(method, k, concurrency)
            ratio = throughput_ratio(cell, grid.none(concurrency)) if cell else None
            points += [Point(k, ratio.value, ratio.low, ratio.high)] if ratio else []
        lines += make_lines(f"{concurrency} at a time", color, points)
    title = f"{method_label(method)}: throughput against K"
    name = f"k-{slug(method)}"
    return k_figure(name, title, "times none's tokens/s", lines, baseline=1.0)


def k_figure(
    name: str, title: str, ylabel: str, lines: Sequence[Line], baseline: float | None = None
) -> Figure:
    """A figure against K. It has no lines where only one K was measured."""
    ticks = tuple(sorted({point.x for line in lines for point in line.points}))
    shown = tuple(lines) if len(ticks) > 1 else ()
    return Figure(name, title, "K", ylabel, shown, baseline=baseline, ticks=ticks)

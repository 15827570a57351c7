"""Grid: the cells of one machine and set, with their winners, speed-ups, front and means."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any, NamedTuple

from peagle.report.words import k_order, method_order
from peagle.results.cell import BenchCell, overlap
from peagle.results.quality import OutputCheck

OVERALL = "overall"  # the set name of a mean over sets
LATENCY_METRICS = tuple(
    f"{statistic}_{latency}_ms"
    for latency in ("ttft", "tpot", "itl")
    for statistic in ("mean", "median", "p99")
)
GEOMETRIC_METRICS = (
    "output_throughput",
    "request_throughput",
    "per_user_throughput",
    "step_ms",
    "joules_per_token",
    *LATENCY_METRICS,
)
ARITHMETIC_METRICS = (
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
    "drafter_share",
)


class Ratio(NamedTuple):
    """The ratio of two medians; `low` and `high` compare the worst run of one with the best."""

    value: float
    low: float
    high: float


class Grid:
    """A method is a `BenchCell.variant` here: trees of each size are a method of their own."""

    def __init__(self, cells: Iterable[BenchCell]) -> None:
        self.cells = sorted(
            cells, key=lambda c: (method_order(c.variant), k_order(c.k), c.concurrency)
        )
        self.measured = [cell for cell in self.cells if cell.throughput is not None]
        self.table = {(cell.variant, cell.k, cell.concurrency): cell for cell in self.measured}
        self.concurrencies = sorted({cell.concurrency for cell in self.measured})
        self.methods = sorted({cell.variant for cell in self.measured}, key=method_order)
        self.drafting = [method for method in self.methods if method != "none"]

    def ks(self, method: str) -> list[int | str]:
        return sorted({cell.k for cell in self.measured if cell.variant == method}, key=k_order)

    def at(self, method: str, k: int | str, concurrency: int) -> BenchCell | None:
        return self.table.get((method, k, concurrency))

    def none(self, concurrency: int) -> BenchCell | None:
        return self.at("none", 0, concurrency)

    def best(self, concurrency: int, method: str | None = None) -> BenchCell | None:
        """The fastest cell, of all methods or of one."""
        candidates = [
            cell
            for cell in self.measured
            if cell.concurrency == concurrency and method in (None, cell.variant)
        ]
        return max(candidates, key=lambda cell: cell.throughput or 0.0, default=None)

    def winners(self, concurrency: int) -> list[BenchCell]:
        """The fastest cell, then the best of each other method whose spread overlaps with it."""
        best = self.best(concurrency)
        if best is None:
            return []
        rivals = [
            self.best(concurrency, method) for method in self.methods if method != best.variant
        ]
        tied = [
            rival
            for rival in rivals
            if rival is not None and overlap(rival.interval, best.interval)
        ]
        return [best, *tied]

    def speedup(self, cell: BenchCell) -> Ratio | None:
        """The throughput of a cell relative to `none` at the same concurrency."""
        return throughput_ratio(cell, self.none(cell.concurrency))

    def pareto_front(self) -> list[BenchCell]:
        """The cells that no other beats in total and user throughput, fastest for a user first."""
        front: list[BenchCell] = []
        candidates = [cell for cell in self.measured if cell.user_throughput is not None]
        for cell in sorted(
            candidates, key=lambda c: (-(c.user_throughput or 0), -(c.throughput or 0))
        ):
            if not front or (cell.throughput or 0) > (front[-1].throughput or 0):
                front.append(cell)
        return front


def throughput_ratio(cell: BenchCell, base: BenchCell | None) -> Ratio | None:
    if base is None or cell.throughput is None or base.throughput is None:
        return None
    low, high = cell.interval
    base_low, base_high = base.interval
    return Ratio(
        cell.throughput / base.throughput,
        low / (base_high or base.throughput),
        high / (base_low or base.throughput),
    )


def set_names(cells: Iterable[BenchCell]) -> list[str]:
    return list(dict.fromkeys(cell.set for cell in cells))


def grids_by_set(cells: Iterable[BenchCell], names: Sequence[str]) -> dict[str, Grid]:
    """A grid for each set, and before them their mean where several sets have cells in common."""
    cells = list(cells)
    by_set = {name: Grid(cell for cell in cells if cell.set == name) for name in names}
    by_set = {name: grid for name, grid in by_set.items() if grid.cells}
    if len(by_set) > 1 and (mean := mean_grid(list(by_set.values()))).cells:
        return {OVERALL: mean} | by_set
    return by_set


def mean_grid(grids: Sequence[Grid]) -> Grid:
    """The mean over sets of the cells that every set has."""
    keys = [key for key in grids[0].table if all(key in grid.table for grid in grids)]
    return Grid(mean_cell([grid.table[key] for grid in grids]) for key in keys)


def mean_cell(cells: Sequence[BenchCell]) -> BenchCell:
    """Geometric means, so that a speed-up is the mean of speed-ups; of shares arithmetic ones."""
    metrics: dict[str, Any] = {}
    for name in GEOMETRIC_METRICS:
        metrics[name] = geometric_mean([cell.metric(name) for cell in cells])
    for name in ARITHMETIC_METRICS:
        metrics[name] = arithmetic_mean([cell.metric(name) for cell in cells])
    return BenchCell(
        key=replace(cells[0].key, set=OVERALL),
        **metrics,
        output_throughput_spread=mean_spread(cells),
        spec_decode_per_position_acceptance_rates=mean_position_rates(cells),
        requests=sum(cell.requests or 0 for cell in cells),
        failed=sum(cell.failed or 0 for cell in cells),
        gpu_memory_bytes=max(cell.gpu_memory_bytes or 0 for cell in cells) or None,
        check=OutputCheck.merge(cell.check for cell in cells),
    )


def mean_spread(cells: Sequence[BenchCell]) -> tuple[float, float] | None:
    spreads = [cell.spread for cell in cells]
    low = geometric_mean([spread[0] if spread else None for spread in spreads])
    high = geometric_mean([spread[1] if spread else None for spread in spreads])
    return None if low is None or high is None else (low, high)


def mean_position_rates(cells: Sequence[BenchCell]) -> tuple[float, ...] | None:
    """None where the cells drafted different numbers of tokens."""
    rows = [cell.spec_decode_per_position_acceptance_rates or () for cell in cells]
    if len({len(row) for row in rows}) != 1:
        return None
    return tuple(sum(rates) / len(rates) for rates in zip(*rows, strict=True))


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """None unless every value is a positive number."""
    known = [value for value in values if value is not None and value > 0]
    return exp(sum(map(log, known)) / len(known)) if len(known) == len(values) else None


def arithmetic_mean(values: Sequence[float | None]) -> float | None:
    """None unless every value is a number."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None

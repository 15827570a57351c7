"""The cells of one machine and set, as questions are asked of them: the best, the speed-up, the front, the mean."""

from collections.abc import Iterable
from math import exp, log
from typing import Any, NamedTuple

from peagle.report.words import by_k, by_method
from peagle.results.runs import ResultCell, overlap, sequence

OVERALL = "overall"
RATES = (
    "output_throughput",
    "request_throughput",
    "per_user_throughput",
    "step_ms",
    "joules_per_token",
)
TIMES = tuple(
    f"{kind}_{what}_ms" for what in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")
)
SHARES = ("spec_decode_acceptance_rate", "spec_decode_acceptance_length", "drafter_share")


class Ratio(NamedTuple):
    """Of two medians; `low` and `high` set the worst run of one against the best of the other."""

    value: float
    low: float
    high: float


class Grid:
    def __init__(self, cells: Iterable[ResultCell]) -> None:
        self.cells = sorted(cells, key=lambda c: (by_method(c.method), by_k(c.k), c.concurrency))
        self.measured = [cell for cell in self.cells if cell.throughput is not None]
        self.table = {(cell.method, cell.k, cell.concurrency): cell for cell in self.measured}
        self.concurrencies = sorted({cell.concurrency for cell in self.measured})
        self.methods = sorted({cell.method for cell in self.measured}, key=by_method)
        self.drafting = [method for method in self.methods if method != "none"]

    def ks(self, method: str) -> list[int | str]:
        return sorted({cell.k for cell in self.measured if cell.method == method}, key=by_k)

    def at(self, method: str, k: int | str, concurrency: int) -> ResultCell | None:
        return self.table.get((method, k, concurrency))

    def none(self, concurrency: int) -> ResultCell | None:
        return self.at("none", 0, concurrency)

    def best(self, concurrency: int, method: str | None = None) -> ResultCell | None:
        """The fastest; of a method at its best K, if one is named."""
        there = [
            c for c in self.measured if c.concurrency == concurrency and method in (None, c.method)
        ]
        return max(there, key=lambda cell: cell.throughput or 0.0, default=None)

    def level(self, concurrency: int) -> list[ResultCell]:
        """The fastest, then the best cell of each other method whose spread overlaps its spread."""
        best = self.best(concurrency)
        if best is None:
            return []
        rivals = [
            self.best(concurrency, method) for method in self.methods if method != best.method
        ]
        return [
            best,
            *(c for c in rivals if c is not None and overlap(c.interval(), best.interval())),
        ]

    def speed_up(self, cell: ResultCell) -> Ratio | None:
        return ratio(cell, self.none(cell.concurrency))

    def front(self) -> list[ResultCell]:
        """Cells that no other beats in both throughput and speed for a user, by falling speed for a user."""
        kept: list[ResultCell] = []
        placed = [cell for cell in self.measured if per_user(cell) is not None]
        for cell in sorted(placed, key=lambda c: (-(per_user(c) or 0), -(c.throughput or 0))):
            if not kept or (cell.throughput or 0) > (kept[-1].throughput or 0):
                kept.append(cell)
        return kept


def ratio(cell: ResultCell, base: ResultCell | None) -> Ratio | None:
    if base is None or cell.throughput is None or base.throughput is None:
        return None
    middle, (low, high), (base_low, base_high) = base.throughput, cell.interval(), base.interval()
    return Ratio(cell.throughput / middle, low / (base_high or middle), high / (base_low or middle))


def per_user(cell: ResultCell) -> float | None:
    """Tokens a second that one user sees; where it was not written down, 1 / TPOT."""
    found, pace = cell.number("per_user_throughput"), cell.number("mean_tpot_ms")
    return found if found is not None else 1000 / pace if pace else None


def sets_of(cells: Iterable[ResultCell]) -> list[str]:
    return list(dict.fromkeys(cell.set for cell in cells))


def grids(cells: Iterable[ResultCell], names: list[str]) -> dict[str, Grid]:
    """A grid a set, and before them their mean where there are several with cells in common."""
    cells = list(cells)
    found = {name: Grid(cell for cell in cells if cell.set == name) for name in names}
    held = {name: grid for name, grid in found.items() if grid.cells}
    if len(held) > 1 and (mean := overall(list(held.values()))).cells:
        return {OVERALL: mean} | held
    return held


def overall(parts: list[Grid]) -> Grid:
    """The geometric mean over sets, so that a speed-up is the mean of the sets' speed-ups; shares: arithmetic.

    Only what every set measured takes part.
    """
    keys = [key for key in parts[0].table if all(key in part.table for part in parts)]
    return Grid(mean_cell([part.table[key] for part in parts]) for key in keys)


def mean_cell(cells: list[ResultCell]) -> ResultCell:
    raw: dict[str, Any] = {}
    for name in (*RATES, *TIMES):
        values = [cell.number(name) for cell in cells]
        raw[name] = geometric(values)
    for name in SHARES:
        values = [cell.number(name) for cell in cells]
        raw[name] = arithmetic(values)
    spreads = [cell.spread() for cell in cells]
    if all(spreads):
        raw["output_throughput_spread"] = [
            geometric([s[end] for s in spreads if s]) for end in (0, 1)
        ]
    rows = [sequence(cell.raw.get("spec_decode_per_position_acceptance_rates")) for cell in cells]
    if len({len(row) for row in rows}) == 1:
        raw["spec_decode_per_position_acceptance_rates"] = [
            arithmetic(list(c)) for c in zip(*rows, strict=True)
        ]
    for name in ("requests", "failed"):
        raw[name] = sum(cell.count(name) for cell in cells)
    raw["gpu_memory_bytes"] = max(cell.number("gpu_memory_bytes") or 0 for cell in cells) or None
    return ResultCell(OVERALL, cells[0].method, cells[0].k, cells[0].concurrency, raw)


def geometric(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and value > 0]
    return exp(sum(map(log, known)) / len(known)) if len(known) == len(values) else None


def arithmetic(values: list[float | None]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known and len(known) == len(values) else None

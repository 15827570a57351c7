"""Tables of the page: every number of every cell, the output check, scores, failures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peagle.report.grid import Grid, per_user
from peagle.report.machines import Machine
from peagle.report.words import (
    DASH,
    amount,
    by_k,
    by_method,
    form_label,
    gigabytes,
    label,
    percent,
    share,
    times,
)
from peagle.results.runs import ResultCell, mapping, number, sequence, with_tree

Column = tuple[str, Callable[[Grid, ResultCell], str]]


@dataclass(frozen=True)
class Table:
    """`heads` of its first columns are row headers."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 1
    best: frozenset[int] = frozenset()  # rows to point out
    long: bool = False  # the last column is prose

    @property
    def length(self) -> int:
        return len(self.rows)


def value(
    name: str, text: Callable[[float | None], str] = amount
) -> Callable[[Grid, ResultCell], str]:
    return lambda _, cell: text(cell.number(name))


def pair_of(first: str, second: str) -> Callable[[Grid, ResultCell], str]:
    return lambda _, cell: joined(cell.number(first), cell.number(second))


def joined(one: float | None, two: float | None) -> str:
    return DASH if one is None and two is None else f"{amount(one)} / {amount(two)}"


def spread(_: Grid, cell: ResultCell) -> str:
    found = cell.spread()
    return f"{amount(found[0])} to {amount(found[1])}" if found else DASH


def speed_up(grid: Grid, cell: ResultCell) -> str:
    found = grid.speed_up(cell)
    return times(found.value) if found and cell.method != "none" else DASH


def failed(_: Grid, cell: ResultCell) -> str:
    found = cell.number("failed")
    return DASH if found is None else f"{found:,.0f} of {cell.count('requests'):,}"


COLUMNS: tuple[Column, ...] = (
    ("tokens/s", value("output_throughput")),
    ("spread", spread),
    ("× none", speed_up),
    ("per user", lambda _, cell: amount(per_user(cell))),
    ("TTFT ms, median / p99", pair_of("median_ttft_ms", "p99_ttft_ms")),
    ("TPOT ms, median / p99", pair_of("median_tpot_ms", "p99_tpot_ms")),
    ("ITL ms, median / p99", pair_of("median_itl_ms", "p99_itl_ms")),
    ("acceptance length", value("spec_decode_acceptance_length")),
    ("acceptance rate", value("spec_decode_acceptance_rate", percent)),
    ("step ms", value("step_ms")),
    ("drafter's share", value("drafter_share", share)),
    ("GPU memory", value("gpu_memory_bytes", gigabytes)),
    ("J/token", lambda _, cell: amount(cell.number("joules_per_token"), 3)),
    ("failed", failed),
)


def all_cells(grid: Grid, caption: str) -> Table:
    """By concurrency; the fastest of each pointed out. A column nobody filled is left out."""
    cells = sorted(grid.cells, key=lambda c: (c.concurrency, by_method(c.method), by_k(c.k)))
    texts = [[text(grid, cell) for _, text in COLUMNS] for cell in cells]
    kept = [i for i in range(len(COLUMNS)) if i == 0 or any(row[i] != DASH for row in texts)]
    rows = [
        (str(cell.concurrency), label(cell), *(row[i] for i in kept))
        for cell, row in zip(cells, texts, strict=True)
    ]
    keys = {found.key for c in grid.concurrencies if (found := grid.best(c))}
    best = frozenset(i for i, cell in enumerate(cells) if cell.key in keys)
    return Table(
        caption, ("at a time", "method", *(COLUMNS[i][0] for i in kept)), tuple(rows), 2, best
    )


def checks(machines: list[Machine]) -> Table:
    """Greedy answers against `none`'s: summed over concurrency, with the differences told."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for machine in machines:
        for cell in sorted(machine.cells, key=lambda c: (by_method(c.method), by_k(c.k))):
            if check := mapping(cell.raw.get("check")):
                found.setdefault((machine.label, cell.set, label(cell)), []).append(check)
    rows: list[tuple[str, ...]] = []
    for names, told in found.items():
        compared, identical = (
            sum(int(number(c.get(name)) or 0) for c in told) for name in ("compared", "identical")
        )
        apart = list(
            dict.fromkeys(
                difference(mapping(d)) for c in told for d in sequence(c.get("differences"))
            )
        )
        more = f"; {len(apart) - 3} more" if len(apart) > 3 else ""
        rate = share(identical / compared) if compared else DASH
        rows.append(
            (*names, f"{identical:,} of {compared:,}", rate, "; ".join(apart[:3]) + more or DASH)
        )
    rows.sort(key=lambda row: row[-1] == DASH)  # what differs comes first
    columns = ("machine", "set", "method", "identical", "share", "first differences")
    return Table("Answers against none's, token by token", columns, tuple(rows), 3, long=True)


def difference(found: dict[str, Any]) -> str:
    margin = number(found.get("margin"))
    tail = f" (margin {margin:.2g})" if margin is not None else ""
    return f"{found.get('task', 'a task')} at token {found.get('at', DASH)}{tail}"


def scores(machines: list[Machine]) -> Table:
    rows = []
    for machine in machines:
        for score in (mapping(s) for run in machine.runs for s in sequence(run.raw.get("scores"))):
            method = with_tree(str(score.get("method", DASH)), int(number(score.get("tree")) or 0))
            name = form_label(method, 0 if method == "none" else score.get("k", DASH))
            of = number(score.get("of"))
            result = share(number(score.get("value"))) + (
                f" of {of:,.0f}" if of is not None else ""
            )
            rows.append(
                (
                    machine.label,
                    str(score.get("set", DASH)),
                    name,
                    str(score.get("metric", DASH)),
                    result,
                )
            )
    return Table(
        "Are the answers as good?", ("machine", "set", "method", "metric", "score"), tuple(rows), 3
    )


def failures(machines: list[Machine]) -> Table:
    rows = []
    for machine in machines:
        for cell in machine.cells:
            if cell.count("failed") or cell.throughput is None or cell.raw.get("first_error"):
                what = f"{label(cell)}, {cell.concurrency} at a time"
                first = str(cell.raw.get("first_error") or DASH)[:300]
                rows.append(
                    (
                        machine.label,
                        cell.set,
                        what,
                        f"{cell.count('failed')} of {cell.count('requests')}",
                        first,
                    )
                )
    return Table(
        "Failed requests",
        ("machine", "set", "cell", "failed", "first error"),
        tuple(rows),
        3,
        long=True,
    )

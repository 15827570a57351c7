"""Runs of one machine under one load, pooled: their cells complete each other, repeated ones join their spreads."""

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from peagle.results.runs import ResultCell, ResultRun, mapping, number, sequence

AXES = (
    "sets",
    "methods",
    "k",
    "tree",
    "concurrency",
    "repeats",
)  # settings in which runs of one load may differ
SUMS = ("requests", "failed", "repeats", "total_output_tokens")


@dataclass(frozen=True)
class Machine:
    """Where it was measured: a column of the report."""

    label: str
    runs: tuple[ResultRun, ...]
    cells: tuple[ResultCell, ...]


def machines(runs: list[ResultRun]) -> list[Machine]:
    groups: list[list[ResultRun]] = []
    for run in runs:
        home = next((group for group in groups if all(alike(run, other) for other in group)), None)
        groups.append([run]) if home is None else home.append(run)
    labels = [machine_label(group[0]) for group in groups]
    seen = Counter(labels)
    return [
        Machine(
            name if seen[name] == 1 else f"{name} ({', '.join(run.name for run in group)})",
            tuple(group),
            pool(group),
        )
        for name, group in zip(labels, groups, strict=True)
    ]


def alike(one: ResultRun, other: ResultRun) -> bool:
    """The same code on the same machine under the same load; drafters may complete each other, not differ."""
    if any(
        one.raw.get(name) != other.raw.get(name) for name in ("engine", "endpoint", "environment")
    ):
        return False
    loads = [
        {k: v for k, v in run.section("settings").items() if k not in AXES} for run in (one, other)
    ]
    mine, theirs = one.section("drafters"), other.section("drafters")
    tasks = one.section("tasks"), other.section("tasks")
    pairs = (mine, theirs), tasks
    return loads[0] == loads[1] and all(
        a[name] == b[name] for a, b in pairs for name in a.keys() & b.keys()
    )


def machine_label(run: ResultRun) -> str:
    where = run.section("environment")
    if run.raw.get("engine") == "endpoint":
        return f"endpoint {run.raw.get('endpoint') or ''}".strip()
    if where.get("gpu"):
        return str(where["gpu"])
    threads = where.get("threads") or where.get("cores")
    return str(where.get("cpu") or "CPU") + (
        f", {threads} thread{'s' if threads != 1 else ''}" if threads else ""
    )


def pool(runs: list[ResultRun]) -> tuple[ResultCell, ...]:
    found: dict[Any, list[ResultCell]] = {}
    for run in runs:
        for cell in run.cells:
            found.setdefault(cell.key, []).append(cell)
    return tuple(cells[0] if len(cells) == 1 else pooled(cells) for cells in found.values())


def pooled(cells: list[ResultCell]) -> ResultCell:
    """Medians of what was measured twice; every single run's throughput, so the spread is of all of them."""
    first = cells[0]
    raw: dict[str, Any] = {}
    for name in {name: None for cell in cells for name in cell.raw}:
        values = [cell.raw[name] for cell in cells if cell.raw.get(name) is not None]
        raw[name] = joined(name, values) if values else None
    singles = [value for cell in cells for value in single_runs(cell)]
    raw |= {
        "output_throughput_runs": singles,
        "output_throughput": median(singles) if singles else None,
    }
    raw["output_throughput_spread"] = [min(singles), max(singles)] if singles else None
    return ResultCell(first.set, first.method, first.k, first.concurrency, raw)


def single_runs(cell: ResultCell) -> list[float]:
    runs = [number(value) for value in sequence(cell.raw.get("output_throughput_runs"))]
    return [run for run in runs if run is not None] or [
        value for value in (cell.throughput,) if value is not None
    ]


def joined(name: str, values: list[Any]) -> Any:
    numbers = [found for value in values if (found := number(value)) is not None]
    if name in ("set", "method", "k", "tree", "concurrency"):
        return values[0]
    if len(numbers) == len(values):
        return sum(numbers) if name in SUMS else median(numbers)
    if name == "check":
        return joined_check([mapping(value) for value in values])
    rows = [sequence(value) for value in values]
    if rows[0] and all(
        len(row) == len(rows[0]) and all(number(x) is not None for x in row) for row in rows
    ):
        return [median(column) for column in zip(*rows, strict=True)]
    return values[0]


def joined_check(checks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "compared": sum(int(number(check.get("compared")) or 0) for check in checks),
        "identical": sum(int(number(check.get("identical")) or 0) for check in checks),
        "differences": [found for check in checks for found in sequence(check.get("differences"))],
    }

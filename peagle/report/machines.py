"""Machine: the results of one machine under one load, pooled.

Their cells complete each other; cells that were measured twice join their spreads.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from peagle.results.cell import BenchCell
from peagle.results.key import CellKey
from peagle.results.metrics import METRIC_FIELDS
from peagle.results.quality import OutputCheck
from peagle.results.run_file import BenchResult
from peagle.results.run_info import RunInfo

# Settings in which results of one load may differ.
AXES = ("sets", "methods", "k", "tree", "concurrency", "repeats")
SUMMED_METRICS = ("requests", "failed", "total_output_tokens")


@dataclass(frozen=True)
class Machine:
    """Where results were measured: a column of the report."""

    label: str
    results: tuple[BenchResult, ...]
    cells: tuple[BenchCell, ...]


def group_by_machine(results: Sequence[BenchResult]) -> list[Machine]:
    groups: list[list[BenchResult]] = []
    for result in results:
        for group in groups:
            if all(same_conditions(result.info, other.info) for other in group):
                group.append(result)
                break
        else:
            groups.append([result])
    labels = [machine_label(group[0].info) for group in groups]
    counts = Counter(labels)
    machines = []
    for label, group in zip(labels, groups, strict=True):
        if counts[label] > 1:
            label = f"{label} ({', '.join(result.name for result in group)})"
        machines.append(Machine(label, tuple(group), pool_cells(group)))
    return machines


def same_conditions(a: RunInfo, b: RunInfo) -> bool:
    """Whether two results have the same code, machine and load.

    Drafters and sets may complete each other, but not differ.
    """
    if (a.engine, a.endpoint, a.environment) != (b.engine, b.endpoint, b.environment):
        return False
    return load_settings(a) == load_settings(b) and all(
        mine[name] == other[name]
        for mine, other in ((a.drafters, b.drafters), (a.tasks, b.tasks))
        for name in mine.keys() & other.keys()
    )


def load_settings(info: RunInfo) -> dict[str, Any]:
    return {name: value for name, value in info.settings.items() if name not in AXES}


def machine_label(info: RunInfo) -> str:
    environment = info.environment
    if info.engine == "endpoint":
        return f"endpoint {info.endpoint or ''}".strip()
    if environment.get("gpu"):
        return str(environment["gpu"])
    cpu = str(environment.get("cpu") or "CPU")
    threads = environment.get("threads") or environment.get("cores")
    if not threads:
        return cpu
    return f"{cpu}, {threads} thread{'s' if threads != 1 else ''}"


def pool_cells(results: Sequence[BenchResult]) -> tuple[BenchCell, ...]:
    by_key: dict[CellKey, list[BenchCell]] = {}
    for result in results:
        for cell in result.cells:
            by_key.setdefault(cell.key, []).append(cell)
    return tuple(cells[0] if len(cells) == 1 else merge_cells(cells) for cells in by_key.values())


def merge_cells(cells: Sequence[BenchCell]) -> BenchCell:
    """Medians of what was measured twice, and the throughput of every run of all cells."""
    metrics = {
        f.name: merge_values(f.name, [getattr(cell, f.name) for cell in cells])
        for f in METRIC_FIELDS
    }
    runs = [rate for cell in cells for rate in run_throughputs(cell)]
    metrics["output_throughput"] = median(runs) if runs else None
    repeats = [cell.repeats for cell in cells if cell.repeats is not None]
    return replace(
        cells[0],
        **metrics,
        repeats=sum(repeats) if repeats else None,
        output_throughput_runs=tuple(runs),
        output_throughput_spread=(min(runs), max(runs)) if runs else None,
        check=OutputCheck.merge(cell.check for cell in cells),
    )


def run_throughputs(cell: BenchCell) -> tuple[float, ...]:
    if cell.output_throughput_runs:
        return cell.output_throughput_runs
    return () if cell.throughput is None else (cell.throughput,)


def merge_values(name: str, values: Sequence[Any]) -> Any:
    """Sums or medians of numbers, medians at each position; of anything else the first value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, int | float) for value in known):
        return sum(known) if name in SUMMED_METRICS else median(known)
    if all(isinstance(value, tuple) and len(value) == len(known[0]) for value in known):
        return tuple(median(column) for column in zip(*known, strict=True))
    return known[0]

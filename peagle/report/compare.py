"""Comparison of two results of the same target: what got worse and is not noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peagle.errors import UserError, did_you_mean
from peagle.report.grid import LATENCY_METRICS
from peagle.report.machines import AXES
from peagle.report.words import cell_label, k_order, method_order
from peagle.results.cell import BenchCell, Interval, overlap
from peagle.results.key import CellKey
from peagle.results.run_file import BenchResult
from peagle.results.run_folder import target_difference

HIGHER_IS_BETTER = (
    "output_throughput",
    "request_throughput",
    "per_user_throughput",
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
)
LOWER_IS_BETTER = (
    *LATENCY_METRICS,
    "step_ms",
    "joules_per_token",
    "energy_joules",
    "gpu_memory_bytes",
    "duration",
)
ROUNDING = 1e-12  # of a threshold
Outcome = Literal["same", "better", "worse", "noise", "gone", "unknown"]


@dataclass(frozen=True)
class Change:
    """One metric of one cell in both results."""

    cell: BenchCell
    metric: str
    before: float | None
    after: float | None
    ratio: float | None  # after / before
    low: float | None  # slowest run after / fastest run before
    high: float | None  # fastest run after / slowest run before
    outcome: Outcome

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{cell.set}, {cell_label(cell)}, {cell.concurrency} at a time: {self.metric}"

    def to_json(self) -> dict[str, Any]:
        return {
            "set": self.cell.set,
            "method": self.cell.variant,
            "k": self.cell.k,
            "concurrency": self.cell.concurrency,
            "metric": self.metric,
            "before": self.before,
            "after": self.after,
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "outcome": self.outcome,
        }


def parse_threshold(text: str) -> float:
    """5% or 0.05."""
    number = text.strip()
    try:
        threshold = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold < 1:
        raise UserError(f"cannot read `threshold` {text!r}: write a share such as 5% or 0.05")
    return threshold


def parse_metrics(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = [*HIGHER_IS_BETTER, *LOWER_IS_BETTER]
    for name in names or [text]:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"unknown metric {name!r}: use some of {', '.join(known)}.{hint}")
    return names


def compare_results(
    before: BenchResult,
    after: BenchResult,
    metrics: Sequence[str],
    threshold: float,
    strict: bool = False,
) -> list[Change]:
    """A change for each metric of each cell that both results have, in a fixed order."""
    cells_before = {cell.key: cell for cell in before.cells}
    cells_after = {cell.key: cell for cell in after.cells}
    shared = sorted((key for key in cells_before if key in cells_after), key=sort_key)
    if not shared:
        raise UserError(
            f"{before.path.name} and {after.path.name} have no cell in common:"
            " measure the same sets, methods, K and concurrency"
        )
    return [
        compare_metric(cells_before[key], cells_after[key], metric, threshold, strict)
        for key in shared
        for metric in metrics
    ]


def sort_key(key: CellKey) -> tuple[Any, ...]:
    return key.set, method_order(key.variant), k_order(key.k), key.concurrency


def compare_metric(
    cell_before: BenchCell, cell_after: BenchCell, metric: str, threshold: float, strict: bool
) -> Change:
    before = cell_before.metric(metric)
    after = cell_after.metric(metric)
    if before is None or after is None or before <= 0 or after < 0:
        lost = metric == "output_throughput" and cell_before.throughput and after is None
        outcome: Outcome = "gone" if lost else "unknown"
        return Change(cell_before, metric, before, after, None, None, None, outcome)
    spread_before = metric_spread(cell_before, metric)
    spread_after = metric_spread(cell_after, metric)
    low, high = spread_before or (before, before)
    new_low, new_high = spread_after or (after, after)
    ratio = after / before
    gain = ratio - 1 if metric in HIGHER_IS_BETTER else 1 - ratio
    outcome = "same"
    if abs(gain) > threshold + ROUNDING:
        outcome = "better" if gain > 0 else "worse"
        if spread_before and spread_after and not strict and overlap(spread_before, spread_after):
            outcome = "noise"
    if metric in HIGHER_IS_BETTER and after == 0:
        outcome = "gone"
    return Change(
        cell_before,
        metric,
        before,
        after,
        ratio,
        new_low / high if high else None,
        new_high / low if low else None,
        outcome,
    )


def metric_spread(cell: BenchCell, metric: str) -> Interval | None:
    """Result files keep the single runs of the throughput only."""
    return cell.spread if metric == "output_throughput" else None


def regressions(changes: Sequence[Change]) -> list[Change]:
    """What got worse, and what is no longer measured."""
    return [change for change in changes if change.outcome in ("worse", "gone")]


def require_same_target(before: BenchResult, after: BenchResult) -> None:
    difference = target_difference([before, after])
    if difference is not None:
        field, values = difference
        raise UserError(
            f"these are different targets ({field}: {' and '.join(values.values())}):"
            " compare results of one target, or use `force`"
        )


def warn_about_conditions(
    before: BenchResult, after: BenchResult, warn: Callable[[str], None]
) -> None:
    """Warn about another machine, another load, cells that only one side has, and failures."""
    for name in ("environment", "settings", "drafters"):
        warn_about_section(name, before, after, warn)
    tasks_before = before.info.tasks
    tasks_after = after.info.tasks
    changed = [
        name
        for name in sorted(tasks_before.keys() & tasks_after.keys())
        if tasks_before[name] != tasks_after[name]
    ]
    if changed:
        warn(f"other tasks in {', '.join(changed)}: the numbers are of different prompts")
    keys_before = {cell.key for cell in before.cells}
    keys_after = {cell.key for cell in after.cells}
    for result, unmatched in (
        (before, keys_before - keys_after),
        (after, keys_after - keys_before),
    ):
        if unmatched:
            warn(f"{len(unmatched)} cells only in {result.path.name}: not compared")
    shared = keys_before & keys_after
    failed = [
        sum(cell.failed or 0 for cell in result.cells if cell.key in shared)
        for result in (before, after)
    ]
    if any(failed):
        warn(f"failed requests: {failed[0]} and {failed[1]}")


def warn_about_section(
    name: str, before: BenchResult, after: BenchResult, warn: Callable[[str], None]
) -> None:
    old = getattr(before.info, name)
    new = getattr(after.info, name)
    ignored = AXES if name == "settings" else ("peagle", "commit")
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if key not in ignored and old.get(key) != new.get(key)
    ]
    if changed:
        values = ", ".join(f"{key} {old.get(key)} and {new.get(key)}" for key in changed)
        warn(f"{name} differs: {values}")

"""Two results of the same target, cell by cell: what got worse by more than a threshold, and is not noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from peagle.errors import UserError, did_you_mean
from peagle.report.machines import AXES
from peagle.report.words import by_k, by_method, label
from peagle.results.runs import ResultCell, ResultRun, difference, overlap

UP = (
    "output_throughput",
    "request_throughput",
    "per_user_throughput",
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
)
DOWN = (
    *(
        f"{kind}_{what}_ms"
        for what in ("ttft", "tpot", "itl")
        for kind in ("mean", "median", "p99")
    ),
    "step_ms",
    "joules_per_token",
    "energy_joules",
    "gpu_memory_bytes",
    "duration",
)
Outcome = Literal["same", "better", "worse", "noise", "gone", "unknown"]


@dataclass(frozen=True)
class Change:
    """One metric of one cell, in both. `ratio` is B / A; `low` and `high`: of the far ends of the spreads."""

    cell: ResultCell
    metric: str
    before: float | None
    after: float | None
    ratio: float | None
    low: float | None
    high: float | None
    outcome: Outcome

    @property
    def name(self) -> str:
        return (
            f"{self.cell.set}, {label(self.cell)}, {self.cell.concurrency} at a time: {self.metric}"
        )

    def as_dict(self) -> dict[str, Any]:
        named = {"set": self.cell.set, "method": self.cell.method, "k": self.cell.k}
        named["concurrency"] = self.cell.concurrency
        told = ("metric", "before", "after", "ratio", "low", "high", "outcome")
        return named | {name: getattr(self, name) for name in told}


def parse_threshold(text: str) -> float:
    """5% or 0.05."""
    try:
        found = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise UserError(f"cannot read --threshold {text!r}: write a share such as 5% or 0.05")
    return found


def parse_metrics(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = [*UP, *DOWN]
    for name in names or [text]:
        if name not in known:
            raise UserError(
                f"unknown metric {name!r}: use some of {', '.join(known)}.{did_you_mean(name, known)}"
            )
    return names


def compare(
    before: ResultRun, after: ResultRun, metrics: list[str], threshold: float, strict: bool = False
) -> list[Change]:
    """A change for each metric of each cell that both measured, in a fixed order."""
    mine, theirs = ({cell.key: cell for cell in run.cells} for run in (before, after))
    shared = [key for key in mine if key in theirs]
    if not shared:
        raise UserError(
            f"{before.path.name} and {after.path.name} have no cell in common:"
            " measure the same sets, methods, K and concurrency"
        )
    shared.sort(key=lambda key: (key[0], by_method(key[1]), by_k(key[2]), key[3]))
    return [
        change(mine[key], theirs[key], metric, threshold, strict)
        for key in shared
        for metric in metrics
    ]


def change(one: ResultCell, two: ResultCell, metric: str, threshold: float, strict: bool) -> Change:
    before, after = one.number(metric), two.number(metric)
    if before is None or after is None or before <= 0 or after < 0:
        lost = metric == "output_throughput" and one.throughput is not None and after is None
        return Change(one, metric, before, after, None, None, None, "gone" if lost else "unknown")
    (low, high), (new_low, new_high) = one.interval(metric), two.interval(metric)
    ratio = after / before
    gain = ratio - 1 if metric in UP else 1 - ratio
    outcome: Outcome = (
        "same" if abs(gain) <= threshold + 1e-12 else "better" if gain > 0 else "worse"
    )
    known = one.spread(metric) and two.spread(metric)
    if outcome != "same" and known and not strict and overlap((low, high), (new_low, new_high)):
        outcome = "noise"
    if metric in UP and after == 0:
        outcome = "gone"
    return Change(
        one,
        metric,
        before,
        after,
        ratio,
        new_low / high if high else None,
        new_high / low if low else None,
        outcome,
    )


def regressions(changes: list[Change]) -> list[Change]:
    """What got worse, and what is no longer there."""
    return [found for found in changes if found.outcome in ("worse", "gone")]


def refuse_other_target(before: ResultRun, after: ResultRun) -> None:
    if found := difference([before, after]):
        field, said = found
        told = " and ".join(said.values())
        raise UserError(
            f"these are different targets ({field}: {told}): compare like with like, or use --force"
        )


def remarks(before: ResultRun, after: ResultRun, warn: Callable[[str], None]) -> None:
    """What a reader should know: another machine, another load, cells of one side only, failures."""
    for name in ("environment", "settings", "drafters"):
        one, two = before.section(name), after.section(name)
        ignored = AXES if name == "settings" else ("peagle", "commit")
        apart = [
            key
            for key in sorted(one.keys() | two.keys())
            if key not in ignored and one.get(key) != two.get(key)
        ]
        if apart:
            warn(
                f"{name} differs: {', '.join(f'{key} {one.get(key)} and {two.get(key)}' for key in apart)}"
            )
    tasks = before.section("tasks"), after.section("tasks")
    if other := [
        name
        for name in sorted(tasks[0].keys() & tasks[1].keys())
        if tasks[0][name] != tasks[1][name]
    ]:
        warn(f"other tasks in {', '.join(other)}: the numbers are of different prompts")
    mine, theirs = ({cell.key for cell in run.cells} for run in (before, after))
    for run, only in ((before, mine - theirs), (after, theirs - mine)):
        if only:
            warn(f"{len(only)} cells only in {run.path.name}: not compared")
    counts = [
        sum(cell.count("failed") for cell in run.cells if cell.key in mine & theirs)
        for run in (before, after)
    ]
    if any(counts):
        warn(f"failed requests: {counts[0]} and {counts[1]}")

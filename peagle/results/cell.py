"""BenchCell: one set, method, draft form and concurrency, in numbers: the medians of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from peagle.results.json_values import as_floats, as_int, as_object
from peagle.results.key import CellKey
from peagle.results.metrics import METRIC_FIELDS, RunMetrics, parse_metrics
from peagle.results.quality import OutputCheck

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class BenchCell(RunMetrics):
    """The metrics are medians over `repeats` runs; `failed` is the maximum."""

    key: CellKey
    repeats: int | None = None
    output_throughput_runs: tuple[float, ...] = ()
    output_throughput_spread: Interval | None = None  # the slowest and the fastest run
    check: OutputCheck | None = None

    @property
    def set(self) -> str:
        return self.key.set

    @property
    def variant(self) -> str:
        """The method with its tree size: reports treat trees of each size as a method."""
        return self.key.variant

    @property
    def k(self) -> int | str:
        return self.key.k

    @property
    def concurrency(self) -> int:
        return self.key.concurrency

    @property
    def throughput(self) -> float | None:
        """Output tokens per second; None where nothing was answered."""
        rate = self.output_throughput
        return rate if rate and rate > 0 else None

    @property
    def user_throughput(self) -> float | None:
        """Tokens per second that one user sees; 1 / TPOT where the file does not have it."""
        if self.per_user_throughput is not None:
            return self.per_user_throughput
        return 1000 / self.mean_tpot_ms if self.mean_tpot_ms else None

    @property
    def spread(self) -> Interval | None:
        """The throughput of the slowest and the fastest run; None for a single run."""
        runs = self.output_throughput_runs
        if len(runs) == 1 or self.repeats == 1:
            return None
        if self.output_throughput_spread is not None:
            return min(self.output_throughput_spread), max(self.output_throughput_spread)
        return (min(runs), max(runs)) if runs else None

    @property
    def interval(self) -> Interval:
        """The spread, or the throughput itself twice where there is none."""
        rate = self.output_throughput or 0.0
        return self.spread or (rate, rate)

    @property
    def all_failed(self) -> bool:
        return bool(self.failed) and not any(self.output_throughput_runs)

    def metric(self, name: str) -> float | None:
        """A metric by its name in the file."""
        value = getattr(self, name)
        return None if value is None else float(value)

    @classmethod
    def from_runs(cls, key: CellKey, runs: Sequence[RunMetrics]) -> "BenchCell":
        """Medians over the runs; of the failures the maximum, so that no bad run is hidden."""
        rates = [run.output_throughput or 0.0 for run in runs]
        medians = {
            f.name: median_value([getattr(run, f.name) for run in runs])
            for f in METRIC_FIELDS
            if f.name not in ("failed", "first_error", "exact_mode")
        }
        return cls(
            key=key,
            **medians,
            failed=max(run.failed or 0 for run in runs),
            first_error=next((run.first_error for run in runs if run.first_error), None),
            exact_mode=runs[-1].exact_mode,
            repeats=len(runs),
            output_throughput_runs=tuple(round_digits(rate) for rate in rates),
            output_throughput_spread=(round_digits(min(rates)), round_digits(max(rates))),
        )

    @classmethod
    def from_json(cls, value: Any) -> "BenchCell | None":  # type: ignore[override]
        """None where the object does not say what it measured."""
        raw = as_object(value)
        key = CellKey.from_json(raw)
        if key is None or "output_throughput" not in raw:
            return None
        spread = as_floats(raw.get("output_throughput_spread")) or ()
        return cls(
            key=key,
            **parse_metrics(raw),
            repeats=as_int(raw.get("repeats")),
            output_throughput_runs=as_floats(raw.get("output_throughput_runs")) or (),
            output_throughput_spread=(spread[0], spread[1]) if len(spread) == 2 else None,
            check=OutputCheck.from_json(raw.get("check")),
        )

    def to_json(self) -> dict[str, Any]:
        metrics = RunMetrics.to_json(self)
        first_error = metrics.pop("first_error")  # stands after the medians in the file
        spread = self.output_throughput_spread
        return {
            **self.key.to_json(),
            **metrics,
            "first_error": first_error,
            "repeats": self.repeats,
            "output_throughput_runs": list(self.output_throughput_runs),
            "output_throughput_spread": None if spread is None else list(spread),
            "check": None if self.check is None else self.check.to_json(),
        }


def overlap(a: Interval, b: Interval) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def median_value(values: Sequence[Any]) -> Any:
    """The median of numbers; of tuples and mappings, item by item. None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        names = sorted({name for value in known for name in value})
        return {name: int(median(value.get(name, 0) for value in known)) for name in names}
    if isinstance(known[0], tuple):
        longest = max(map(len, known))
        return tuple(
            median_value([value[i] for value in known if i < len(value)]) for i in range(longest)
        )
    middle = median(known)
    return int(middle) if all(isinstance(value, int) for value in known) else round_digits(middle)


def round_digits(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")

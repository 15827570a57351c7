"""Tuner: the best method and K at every concurrency, with few measurements.

One run with the largest K gives the share accepted at every position, and with it the tokens of a
step with any K:

    E(K) = 1 + a_1 + ... + a_K      a_i: the share of steps that accept draft i, for any K

The cost of a step is about linear in K. So after two K at a load, the throughput of the others can
be predicted from those two; the most promising K is measured next, and the search ends when none
promises more than the best one has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peagle.bench.load.jobs import LoadJob
from peagle.bench.session import Runner
from peagle.catalog.pair import Best
from peagle.core import parse_method
from peagle.cost.terms import cost_per_million
from peagle.errors import UserError
from peagle.interpolation import fit_line
from peagle.results.key import CellKey

MIN_PREDICTED_GAIN = 0.01  # a K must promise this much more than the best to be measured
NEAR_BEST = 0.03  # a candidate this close to the best is measured twice
MAX_KS_PER_LOAD = 5  # measured for each method at one concurrency
MIN_REQUESTS = 8  # of a measurement


@dataclass(frozen=True, slots=True)
class TunePoint:
    """One method and K, measured at one concurrency."""

    throughput: float  # tokens per second
    step_ms: float
    position_rates: tuple[float, ...] = ()  # the share accepted at each position


Measure = Callable[[int], TunePoint]  # K -> its measurement


def expected_tokens(rates: Sequence[float], k: int) -> float:
    """The tokens of a step: E(K)."""
    return 1 + sum(rates[:k])


def search_k(
    measure: Measure, rates: Sequence[float], ks: Sequence[int], start: int
) -> dict[int, TunePoint]:
    """Measure `start` and a K far from it, then the most promising K until none promises a gain."""
    start = min(ks, key=lambda k: abs(k - start))
    points = {start: measure(start)}
    if len(ks) > 1:
        second = second_k(ks, start)
        points[second] = measure(second)
    while len(points) < min(MAX_KS_PER_LOAD, len(ks)):
        predicted = predict_throughput(points, rates, ks)
        candidate = max(predicted, key=lambda k: predicted[k])
        best = max(point.throughput for point in points.values())
        if predicted[candidate] <= (1 + MIN_PREDICTED_GAIN) * best:
            break
        points[candidate] = measure(candidate)
    return points


def second_k(ks: Sequence[int], start: int) -> int:
    """About half of `start`, since more load favors a smaller K; else the next larger."""
    smaller = [k for k in ks if k < start]
    if not smaller:
        return min(k for k in ks if k > start)
    return min(smaller, key=lambda k: abs(k - start / 2))


def predict_throughput(
    points: Mapping[int, TunePoint], rates: Sequence[float], ks: Iterable[int]
) -> dict[int, float]:
    """Tokens per second with every K that is not measured.

    That of the nearest measured K, scaled by the tokens and the cost of a step.
    """
    costs = {k: point.step_ms for k, point in points.items()}
    predicted = {}
    for k in (k for k in ks if k not in points):
        near = min(points, key=lambda known: abs(known - k))
        gain = expected_tokens(rates, k) / expected_tokens(rates, near)
        predicted[k] = points[near].throughput * gain * costs[near] / fit_line(costs, k)
    return predicted


@dataclass(slots=True)
class Tuner:
    """Every measurement at one concurrency runs the same jobs."""

    runner: Runner
    jobs: Sequence[LoadJob]
    methods: Sequence[str]
    ks: Sequence[int]
    on_start: Callable[[str], None] = lambda activity: None
    position_rates: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by method
    points: dict[tuple[str, int, int], TunePoint] = field(  # by method, K, concurrency
        default_factory=dict
    )
    measurements: int = 0

    def measure(self, method: str, k: int, concurrency: int) -> TunePoint:
        """Measure once more if there is a measurement already; then the mean counts."""
        self.on_start(f"c={concurrency} {method}" + (f" K={k}" if k else ""))
        jobs = [self.jobs[i % len(self.jobs)] for i in range(request_count(concurrency))]
        run = self.runner.run(CellKey("tune", method, k, concurrency), jobs, lambda: None)
        if run.failed:
            raise UserError(f"tuning failed at c={concurrency} {method}: {run.failed[0].error}")
        self.measurements += 1
        metrics = run.metrics()
        point = TunePoint(
            metrics.output_throughput or 0.0,
            metrics.step_ms or 0.0,
            metrics.spec_decode_per_position_acceptance_rates or (),
        )
        known = self.points.get((method, k, concurrency))
        if known is not None:
            point = TunePoint(
                (known.throughput + point.throughput) / 2,
                min(known.step_ms, point.step_ms),
                point.position_rates,
            )
        self.points[method, k, concurrency] = point
        return point

    def tune(self, concurrency: int, start: int) -> Best:
        """`start`: the K to begin with, the best one of the next lower concurrency."""
        self.measure("none", 0, concurrency)
        max_k = max(self.ks)
        for method in self.methods:
            if method not in self.position_rates:
                point = self.measure(method, max_k, concurrency)
                self.position_rates[method] = point.position_rates
            measured_max = (method, max_k, concurrency) in self.points
            search_k(
                self._measure_once(method, concurrency),
                self.position_rates[method],
                self.ks,
                max_k if measured_max else start,
            )
        return self._choose_best(concurrency)

    def _measure_once(self, method: str, concurrency: int) -> Measure:
        def measure(k: int) -> TunePoint:
            return self.points.get((method, k, concurrency)) or self.measure(method, k, concurrency)

        return measure

    def _choose_best(self, concurrency: int) -> Best:
        """Measure the candidates close to the best once more, so that noise does not decide."""
        points = self.points_at(concurrency)
        best = max(point.throughput for point in points.values())
        close = [
            name for name, point in points.items() if point.throughput >= (1 - NEAR_BEST) * best
        ]
        if len(close) > 1:
            for method, k in close:
                self.measure(method, k, concurrency)
        points = self.points_at(concurrency)
        method, k = max(close, key=lambda name: points[name].throughput)
        return Best(parse_method(method), k)

    def points_at(self, concurrency: int) -> dict[tuple[str, int], TunePoint]:
        """By method and K."""
        return {(m, k): point for (m, k, c), point in self.points.items() if c == concurrency}


def request_count(concurrency: int) -> int:
    return max(MIN_REQUESTS, 2 * concurrency)


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The best method and K at one concurrency, as the pair's settings keep it."""

    concurrency: int
    method: str
    k: int
    output_throughput: float  # tokens per second
    none: float  # tokens per second without drafts
    speedup: float | None
    cost_per_million: float | None  # None without a price

    def to_json(self) -> dict[str, Any]:
        entry = asdict(self)
        if self.cost_per_million is None:
            del entry["cost_per_million"]
        return entry


def tuned_choices(tuner: Tuner, best: Mapping[int, Best], price: float | None) -> list[TunedChoice]:
    """`best` by concurrency; `price` of an hour of this machine."""
    choices = []
    for concurrency, chosen in best.items():
        rate = tuner.points[chosen.method, chosen.k, concurrency].throughput
        none = tuner.points["none", 0, concurrency].throughput
        choices.append(
            TunedChoice(
                concurrency,
                chosen.method,
                chosen.k,
                round(rate, 2),
                round(none, 2),
                round(rate / none, 3) if none else None,
                round(cost_per_million(rate, price), 4) if price is not None else None,
            )
        )
    return choices

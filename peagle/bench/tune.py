"""The best method and K at every concurrency, with few measurements.

One run with the largest K tells the share accepted at every position, and with it the tokens a step yields with any K:

    E(K) = 1 + a_1 + ... + a_K          (a_i: the share of steps that accept draft i; it does not depend on K)

A step's cost is about linear in K. So after two K at a load, the throughput of the others can be told, relative to what
was measured; the most promising is measured next, and the search ends when none promises more than the best one has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.bench.load.jobs import LoadJob
from peagle.bench.session import Runner
from peagle.catalog.pair import Best
from peagle.core import parse_method
from peagle.cost.terms import price_of
from peagle.errors import UserError
from peagle.interpolation import fit_line
from peagle.results.cell import CellKey

WORTH = 0.01  # a K must promise so much more to be measured
CLOSE = 0.03  # so near to the best, and it is measured once more
MOST = 5  # K measured for a method at one load
FEWEST = 8  # requests of a measurement


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    throughput: float  # tokens a second
    step_ms: float
    rates: tuple[float, ...] = ()  # accepted at each position


Measure = Callable[[int], Point]


def expected(rates: Sequence[float], k: int) -> float:
    """Tokens of a step."""
    return 1 + sum(rates[:k])


def search(
    measure: Measure, rates: Sequence[float], ks: Sequence[int], start: int
) -> dict[int, Point]:
    """Measures `start` and its far neighbor, then what promises most, until nothing does."""
    start = min(ks, key=lambda k: abs(k - start))
    found = {start: measure(start)}
    if len(ks) > 1:
        other = second(ks, start)
        found[other] = measure(other)
    while len(found) < min(MOST, len(ks)):
        told = predictions(found, rates, ks)
        best = max(told, key=lambda k: told[k])
        if told[best] <= (1 + WORTH) * max(point.throughput for point in found.values()):
            break
        found[best] = measure(best)
    return found


def second(ks: Sequence[int], start: int) -> int:
    """About half of the first K, which is what more load asks for; upwards where there is nothing below."""
    below = [k for k in ks if k < start]
    return (
        min(below, key=lambda k: abs(k - start / 2)) if below else min(k for k in ks if k > start)
    )


def predictions(
    found: Mapping[int, Point], rates: Sequence[float], ks: Iterable[int]
) -> dict[int, float]:
    """Tokens a second with every K that is not measured: as the nearest measured one, but for yield and cost."""
    costs = {k: point.step_ms for k, point in found.items()}
    told = {}
    for k in (k for k in ks if k not in found):
        near = min(found, key=lambda known: abs(known - k))
        gain = expected(rates, k) / expected(rates, near)
        told[k] = found[near].throughput * gain * costs[near] / fit_line(costs, k)
    return told


@dataclass(slots=True)
class Tuner:
    """`jobs`: prompts to draw from; every measurement at one load gets the same."""

    runner: Runner
    jobs: Sequence[LoadJob]
    methods: Sequence[str]
    ks: Sequence[int]
    begins: Callable[[str], None] = lambda what: None
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    points: dict[tuple[str, int, int], Point] = field(
        default_factory=dict
    )  # method, K, concurrency
    runs: int = 0

    def measure(self, method: str, k: int, concurrency: int) -> Point:
        """Once more, if it was measured before: then the mean counts."""
        self.begins(f"c={concurrency} {method}" + (f" K={k}" if k else ""))
        count = requests(concurrency)
        run = self.runner.run(
            CellKey("tune", method, k, concurrency),
            [self.jobs[i % len(self.jobs)] for i in range(count)],
            lambda: None,
        )
        told = run.as_dict()
        if run.failed:
            raise UserError(f"tuning failed at c={concurrency} {method}: {run.failed[0].error}")
        self.runs += 1
        rates = tuple(told["spec_decode_per_position_acceptance_rates"] or ())
        point = Point(told["output_throughput"], told["step_ms"] or 0.0, rates)
        known = self.points.get((method, k, concurrency))
        if known is not None:
            point = Point(
                (known.throughput + point.throughput) / 2, min(known.step_ms, point.step_ms), rates
            )
        self.points[method, k, concurrency] = point
        return point

    def tune(self, concurrency: int, start: int) -> Best:
        """`start`: the K to begin with, the best one at the load before."""
        self.measure("none", 0, concurrency)
        for method in self.methods:
            if method not in self.rates:
                self.rates[method] = self.measure(method, max(self.ks), concurrency).rates
            known = (method, max(self.ks), concurrency) in self.points
            search(
                self._measured(method, concurrency),
                self.rates[method],
                self.ks,
                max(self.ks) if known else start,
            )
        return self._best(concurrency)

    def _measured(self, method: str, concurrency: int) -> Measure:
        def measure(k: int) -> Point:
            return self.points.get((method, k, concurrency)) or self.measure(method, k, concurrency)

        return measure

    def _best(self, concurrency: int) -> Best:
        """Those that come close to the best are measured once more: noise must not decide."""
        here = self.at(concurrency)
        top = max(point.throughput for point in here.values())
        close = [name for name, point in here.items() if point.throughput >= (1 - CLOSE) * top]
        if len(close) > 1:
            for method, k in close:
                self.measure(method, k, concurrency)
        here = {name: point for name, point in self.at(concurrency).items() if name in close}
        method, k = max(here, key=lambda name: here[name].throughput)
        return Best(parse_method(method), k)

    def at(self, concurrency: int) -> dict[tuple[str, int], Point]:
        return {(m, k): point for (m, k, c), point in self.points.items() if c == concurrency}


def requests(concurrency: int) -> int:
    return max(FEWEST, 2 * concurrency)


def entries(tuner: Tuner, best: Mapping[int, Best], price: float | None) -> list[dict[str, Any]]:
    told = []
    for c, one in best.items():
        rate, plain = (
            tuner.points[one.method, one.k, c].throughput,
            tuner.points["none", 0, c].throughput,
        )
        entry: dict[str, Any] = {
            "concurrency": c,
            "method": one.method,
            "k": one.k,
            "output_throughput": round(rate, 2),
        }
        entry |= {"none": round(plain, 2), "speedup": round(rate / plain, 3) if plain else None}
        told.append(
            entry
            | ({"cost_per_million": round(price_of(rate, price), 4)} if price is not None else {})
        )
    return told


def explain(tuner: Tuner, best: Mapping[int, Best], price: float | None) -> list[str]:
    """Three lines: what, why, what it costs."""
    told = entries(tuner, best, price)
    what = "; ".join(
        f"c={e['concurrency']}: {label(e['method'], e['k'])}, {e['output_throughput']:,.0f} tokens/s"
        f" ({e['speedup']:.2f}x none)"
        for e in told
    )
    why = "; ".join(reason(tuner, c) for c in best)
    shares = "; ".join(
        f"{m} {' '.join(f'{share:.2f}' for share in rates)}" for m, rates in tuner.rates.items()
    )
    if price is None:
        cost = (
            "Cost: give --price, what an hour of this machine costs, to see it per million tokens."
        )
    else:
        sums = ", ".join(f"c={e['concurrency']} {e['cost_per_million']:,.3g}" for e in told)
        cost = f"Cost per million tokens at {price:g} an hour: {sums}."
    return [f"Best: {what}.", f"Why: accepted by position: {shares}. {why}.", cost]


def reason(tuner: Tuner, concurrency: int) -> str:
    """How a step's cost grows with K there: of the method with most K measured."""
    here = tuner.at(concurrency)
    method = max(tuner.methods, key=lambda m: sum(name == m for name, _ in here), default=None)
    costs = {k: point.step_ms for (m, k), point in here.items() if m == method}
    if method is None or len(costs) < 2:
        return f"at c={concurrency} only none was measured"
    low, high = min(costs), max(costs)
    grows = costs[high] / costs[low] if costs[low] else 0.0
    return f"at c={concurrency} a step of {method} takes {costs[low]:.1f} ms with K={low}, {grows:.2f}x that with K={high}"


def label(method: str, k: int) -> str:
    return f"{method} K={k}" if k else method

"""The price of exact mode: tokens/s and milliseconds of a step beside those of the fast mode.

An engine of each mode serves the same requests in turn, fast, exact, fast, exact, .., after a run
of each that does not count: what changes with time changes both. A cell has the median of its
runs, from the smallest to the largest, and the percentages of the pairs of neighboring runs.

The modes write different answers, so with `natural` acceptance their lengths differ. `forced`
accepts drafts at random with given probabilities (engine/sampling/forced_acceptance.py), from the
same seeds: both modes emit as many tokens in each step, and the price is that of the work alone.
Without drafts there is nothing to force.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch

from benchmarks.exact.engines import CONTEXT, NONE, Asked, Drafting, Speed, engine_of, measure
from benchmarks.exact.part_report import PartReport
from peagle.engine import Engine
from peagle.loaded import LoadedPair

ACCEPTANCE = [0.78, 0.76, 0.73, 0.67, 0.62, 0.56, 0.5]  # of drafts that are forced


@dataclass(frozen=True)
class PriceLoad:
    """What the engines of both modes are measured with."""

    asked: list[Asked]
    requests: dict[int, int]  # requests of a run, by how many run at a time
    repeats: int

    def of(self, concurrency: int) -> list[Asked]:
        count = self.requests[concurrency]
        return [self.asked[i % len(self.asked)] for i in range(count)]


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], digits: int) -> "Spread":
        figures = statistics.median(values), min(values), max(values)
        return cls(*(round(figure, digits or None) for figure in figures))

    def __str__(self) -> str:
        return f"{self.median:,} ({self.low:,}..{self.high:,})"


@dataclass(frozen=True)
class ModeFigures:
    tokens_per_second: Spread
    step_ms: Spread
    length: float  # tokens per step of a request, over all runs
    nodes: list[int]  # of the draft of most steps, by run

    @classmethod
    def of(cls, runs: Sequence[Speed]) -> "ModeFigures":
        return cls(
            Spread.of([run.tokens_per_second for run in runs], 0),
            Spread.of([run.step_ms for run in runs], 4),
            round(statistics.mean(run.length for run in runs), 3),
            [run.nodes for run in runs],
        )


@dataclass(frozen=True)
class PriceCell:
    price: str  # the pair
    drafting: str
    acceptance: str  # natural or forced
    exact_mode: str | None  # "one by one": steps cannot be compared, for they have one request
    requests: int  # at a time
    repeats: int
    fast: ModeFigures
    exact: ModeFigures
    percent: Spread  # fewer tokens/s in exact mode
    step_percent: Spread  # longer steps

    def line(self) -> str:
        fast, exact = self.fast, self.exact
        return (
            f"{self.price} {self.drafting}, {self.acceptance}, {self.requests}:"
            f" tokens/s {fast.tokens_per_second} -> {exact.tokens_per_second},"
            f" {self.percent} % fewer;"
            f" step {fast.step_ms} -> {exact.step_ms} ms, {self.step_percent} % longer;"
            f" length {fast.length} -> {exact.length}; {self.repeats} runs, {self.exact_mode}"
        )


def price_cell(
    name: str,
    drafting: Drafting,
    forced: bool,
    exact_mode: str | None,
    requests: int,
    runs: Sequence[tuple[Speed, Speed]],
) -> PriceCell:
    """`runs`: pairs of a run of the fast mode and the run of exact mode behind it."""
    fewer = [100 * (1 - e.tokens_per_second / f.tokens_per_second) for f, e in runs]
    longer = [100 * (exact.step_ms / fast.step_ms - 1) for fast, exact in runs]
    return PriceCell(
        name,
        drafting.name,
        "forced" if forced else "natural",
        exact_mode,
        requests,
        len(runs),
        ModeFigures.of([fast for fast, _ in runs]),
        ModeFigures.of([exact for _, exact in runs]),
        Spread.of(fewer, 1),
        Spread.of(longer, 1),
    )


@contextmanager
def warm_engine(
    pair: LoadedPair, drafting: Drafting, exact: bool, forced: bool, max_batch: int
) -> Iterator[Engine]:
    """Its KV cache leaves memory to a second engine."""
    engine = engine_of(pair, drafting, exact, max_batch=max_batch, kv_tokens=max_batch * CONTEXT)
    try:
        if forced:
            engine.force_acceptance(ACCEPTANCE)  # before CUDA graphs are captured
        engine.warm_up()
        yield engine
    finally:
        engine.close()


def alternate(
    engines: Sequence[Engine], load: PriceLoad, concurrency: int, has_time: Callable[[], bool]
) -> list[tuple[Speed, Speed]]:
    """Runs of both engines in turn; those that end behind the time limit are the last ones."""
    asked = load.of(concurrency)
    for engine in engines:
        measure(engine, asked, concurrency)
    runs: list[tuple[Speed, Speed]] = []
    while len(runs) < load.repeats and (has_time() or not runs):
        pair = []
        for engine in engines:
            torch.manual_seed(len(runs))  # of forced acceptance
            pair.append(measure(engine, asked, concurrency))
        runs.append((pair[0], pair[1]))
    return runs


def measure_drafting(
    report: PartReport,
    name: str,
    pair: LoadedPair,
    drafting: Drafting,
    forced: bool,
    load: PriceLoad,
) -> list[PriceCell]:
    """A cell for each number of requests at a time, as long as there is time."""
    cells: list[PriceCell] = []
    with ExitStack() as stack:
        engines = [
            stack.enter_context(warm_engine(pair, drafting, exact, forced, max(load.requests)))
            for exact in (False, True)
        ]
        for concurrency in load.requests:
            if not report.has_time:
                break
            runs = alternate(engines, load, concurrency, lambda: report.has_time)
            mode = engines[1].exact_mode
            cells.append(price_cell(name, drafting, forced, mode, concurrency, runs))
            report.add(**asdict(cells[-1]))
    gc.collect()  # The next engines need the memory.
    return cells


def measure_price(
    report: PartReport,
    name: str,
    pair: LoadedPair,
    draftings: Sequence[Drafting],
    acceptances: Sequence[str],
    load: PriceLoad,
) -> None:
    """All cells; the table is printed last."""
    cells: list[PriceCell] = []
    for drafting in draftings:
        for acceptance in acceptances:
            forced = acceptance == "forced"
            if forced and drafting == NONE and "natural" in acceptances:
                continue
            if not report.has_time:
                report.add(price=name, drafting=drafting.name, skipped=acceptance)
                continue
            own_forced = forced and drafting != NONE
            cells += measure_drafting(report, name, pair, drafting, own_forced, load)
    print(f"\n== the price of exact mode, {name}: median (min..max)")
    for cell in cells:
        print(cell.line())

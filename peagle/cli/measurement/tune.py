import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, warn
from peagle.cli.measurement.lists import parse_counts, split_words
from peagle.cli.measurement.options import (
    DEFAULT_SETS,
    DataFolder,
    Drafters,
    SetNames,
    UserCounts,
)
from peagle.cli.measurement.tune_output import print_plan, print_summary
from peagle.cli.options import Device, Dtype, MaxTokens, Target
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.load.jobs import LoadJob
    from peagle.bench.tune import Tuner
    from peagle.catalog.pair import Best
    from peagle.loaded import LoadedPair

WARMUP_TOKENS = 16

PairName = Annotated[str, typer.Argument(help="The pair.")]
DraftLengths = Annotated[str, typer.Option("-k", "--k", help="The K to choose from.")]
Price = Annotated[
    float | None,
    typer.Option("--price", help="What an hour of this machine costs.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be measured.")]


@app.command()
def tune(
    pair: PairName = DEFAULT_PAIR,
    concurrency: UserCounts = "1,8,64",
    k: DraftLengths = "1,2,3,4,5,6,7,9,11",
    price: Price = None,
    sets: SetNames = DEFAULT_SETS,
    max_tokens: MaxTokens = 128,
    data: DataFolder = None,
    target: Target = None,
    drafter: Drafters = None,
    dry_run: DryRun = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Find the best method and K for each load on this machine; keep them in the pair's settings.

    Example: peagle tune smollm2-135m --concurrency 1,8,64 --price 4.5
    """
    from peagle.core import check_k
    from peagle.engine.gc_tuning import freeze_live_objects
    from peagle.loaded import load_with_drafters
    from peagle.progress import progress_bars

    counts = sorted(parse_counts(concurrency))
    ks = sorted(check_k(number) for number in parse_counts(k, "-k"))
    if price is not None and price <= 0:
        raise UserError(f"--price is {price:g}: give what an hour costs, like --price 4.5")
    if max_tokens < 2:
        raise UserError(f"--max-tokens is {max_tokens}: nothing is drafted below 2")
    jobs = mixed_jobs(sets, data, max_tokens)
    with progress_bars(err) as progress:
        loaded = load_with_drafters(pair, target, drafter, device, dtype, progress=progress)
    freeze_live_objects()
    methods = trained_methods(loaded)
    if dry_run:
        print_plan(loaded, methods, counts, ks, len(jobs))
        return
    start = time.perf_counter()
    tuner, best = measure_all(loaded, jobs, methods, counts, ks)
    own_models = target is None and drafter is None
    path = save(loaded, tuner, best, price, max_tokens) if own_models else None
    print_summary(tuner, best, price)
    seconds = time.perf_counter() - start
    where = f"kept in {path}" if path else "not kept: --target or --drafter makes it another pair"
    err.print(
        f"{tuner.measurements} measurements in {seconds:.0f} s; {escape(where)}", highlight=False
    )


def mixed_jobs(sets: str, data: Path | None, max_tokens: int) -> "list[LoadJob]":
    """The first turns of the sets' tasks, taken from the sets in turn."""
    from dataclasses import replace
    from itertools import chain, zip_longest

    from peagle.bench.load.jobs import make_jobs
    from peagle.data.bench import read_sets

    by_set = read_sets(split_words(sets), data, None, warn)
    mixed = chain.from_iterable(zip_longest(*by_set.values()))
    tasks = [replace(task, turns=task.turns[:1]) for task in mixed if task is not None]
    return make_jobs(tasks, max_tokens, seed=0)


def trained_methods(loaded: "LoadedPair") -> list[str]:
    methods: list[str] = []
    for method in sorted(loaded.pair.drafters, reverse=True):
        if loaded.drafter(method).config.trained:
            methods.append(method)
        else:
            warn(
                f"the {method} drafter of this pair is untrained and cannot win: it is not measured"
            )
    if not methods:
        warn(
            "no trained drafter: only `none` is measured. Train one, or give it with --drafter DIR"
        )
    return methods


def measure_all(
    loaded: "LoadedPair",
    jobs: "list[LoadJob]",
    methods: list[str],
    counts: list[int],
    ks: list[int],
) -> "tuple[Tuner, dict[int, Best]]":
    from peagle.bench.load.native import NativeRunner
    from peagle.bench.tune import Tuner, request_count

    used = jobs[: request_count(max(counts))]
    # `exact` as in `peagle serve`, whose settings are chosen here.
    runner = NativeRunner(
        loaded, used, max(counts), temperature=0.0, exact=None, warmup=WARMUP_TOKENS
    )
    best: dict[int, Best] = {}
    with err.status("starting") as status:
        tuner = Tuner(
            runner,
            used,
            methods,
            ks,
            lambda activity: status.update(f"measuring {escape(activity)}"),
        )
        start_k = loaded.pair.k
        try:
            for count in counts:
                best[count] = tuner.tune(count, start_k)
                start_k = best[count].k or start_k
        finally:
            runner.close()
    return tuner, best


def save(
    loaded: "LoadedPair",
    tuner: "Tuner",
    best: "dict[int, Best]",
    price: float | None,
    max_tokens: int,
) -> Path:
    from peagle import __version__
    from peagle.bench.tune import tuned_choices
    from peagle.catalog.tuned import machine_of, write_tuned
    from peagle.results.writer import utc_now

    entry = {
        "created": utc_now(),
        "peagle": __version__,
        "max_tokens": max_tokens,
        "price": price,
        "by_concurrency": [choice.to_json() for choice in tuned_choices(tuner, best, price)],
        "acceptance": {
            method: [round(rate, 4) for rate in rates]
            for method, rates in tuner.position_rates.items()
        },
        "measured": [
            {
                "concurrency": c,
                "method": method,
                "k": k,
                "output_throughput": round(point.throughput, 2),
            }
            for (method, k, c), point in tuner.points.items()
        ],
    }
    target = loaded.target
    machine = machine_of(target.device, target.dtype, target.stored_format)
    return write_tuned(loaded.pair, machine, entry)

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, out, warn
from peagle.cli.measurement.bench import SETS
from peagle.cli.options import Device, Dtype, Target
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.load.jobs import LoadJob
    from peagle.bench.tune import Tuner
    from peagle.catalog.pair import Best
    from peagle.loaded import LoadedPair


@app.command()
def tune(
    pair: Annotated[str, typer.Argument(help="The pair.")] = DEFAULT_PAIR,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Users at a time.")] = "1,8,64",
    k: Annotated[
        str, typer.Option("-k", "--k", help="The K to choose from.")
    ] = "1,2,3,4,5,6,7,9,11",
    price: Annotated[
        float | None,
        typer.Option("--price", help="What an hour of this machine costs.", show_default=False),
    ] = None,
    sets: Annotated[
        str, typer.Option("--set", help="Prompts: names or JSONL files, by commas.")
    ] = SETS,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The longest answer.")] = 128,
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder with NAME.jsonl.", show_default=False)
    ] = None,
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            help="Drafters' folders instead of the pair's, by commas.",
            show_default=False,
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be measured.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Find the best method and K for each load on this machine, and keep them in the pair's settings.

    Example: peagle tune smollm2-135m --concurrency 1,8,64 --price 4.5
    """
    from peagle.bench.settings import parse_counts
    from peagle.bench.tune import explain
    from peagle.core import check_k
    from peagle.engine.gc_tuning import freeze_live_objects
    from peagle.loaded import load_with_drafters
    from peagle.progress import progress_bars

    counts, ks = (
        sorted(parse_counts(concurrency)),
        sorted(check_k(one) for one in parse_counts(k, "-k")),
    )
    if price is not None and price <= 0:
        raise UserError(f"--price is {price:g}: give what an hour costs, like --price 4.5")
    if max_tokens < 2:
        raise UserError(f"--max-tokens is {max_tokens}: nothing is drafted below 2")
    jobs = mixed_jobs(sets, data, max_tokens)
    with progress_bars(err) as progress:
        loaded = load_with_drafters(pair, target, drafter, device, dtype, progress)
    freeze_live_objects()
    methods = trained_methods(loaded)
    if dry:
        tell_plan(loaded, methods, counts, ks, len(jobs))
        return
    started = time.perf_counter()
    tuner, best = measure_all(loaded, jobs, methods, counts, ks)
    own = target is None and drafter is None
    path = keep(loaded, tuner, best, price, max_tokens) if own else None
    for text in explain(tuner, best, price):
        out.print(escape(text), highlight=False, soft_wrap=True)
    seconds = time.perf_counter() - started
    where = f"kept in {path}" if path else "not kept: with --target or --drafter it is another pair"
    err.print(f"{tuner.runs} measurements in {seconds:.0f} s; {escape(where)}", highlight=False)


def mixed_jobs(sets: str, data: Path | None, max_tokens: int) -> "list[LoadJob]":
    """The sets in turn, first turns only."""
    from dataclasses import replace
    from itertools import chain, zip_longest

    from peagle.bench.load.jobs import jobs_of
    from peagle.data.bench import read_sets

    found = read_sets([word.strip() for word in sets.split(",") if word.strip()], data, None, warn)
    tasks = [task for task in chain.from_iterable(zip_longest(*found.values())) if task is not None]
    return jobs_of([replace(task, turns=task.turns[:1]) for task in tasks], max_tokens, seed=0)


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


def tell_plan(
    loaded: "LoadedPair", methods: list[str], counts: list[int], ks: list[int], prompts: int
) -> None:
    from peagle.bench.tune import MOST, requests
    from peagle.catalog.tuned import tuned_path

    most = len(counts) * (1 + len(methods) * min(MOST, len(ks)))
    lines = [
        f"none, then {', '.join(methods) or 'nothing else'}, at concurrency {', '.join(map(str, counts))};"
        f" K from {', '.join(map(str, ks))}, no more than {MOST} of them for a method at one load.",
        f"First K={max(ks)} at c={counts[0]}: its acceptance by position tells which other K can win.",
        f"At most {most} measurements (and the close ones again) of {', '.join(str(requests(c)) for c in counts)}"
        f" requests, from {prompts} prompts; written to {tuned_path(loaded.pair)}.",
    ]
    for text in lines:
        out.print(escape(text), highlight=False, soft_wrap=True)


def measure_all(
    loaded: "LoadedPair",
    jobs: "list[LoadJob]",
    methods: list[str],
    counts: list[int],
    ks: list[int],
) -> "tuple[Tuner, dict[int, Best]]":
    from peagle.bench.load.native import NativeRunner
    from peagle.bench.tune import Tuner, requests

    used = jobs[: requests(max(counts))]
    runner = NativeRunner(loaded, used, max(counts), temperature=0.0, exact=False, warmup=16)
    best: dict[int, Any] = {}
    with err.status("starting") as status:
        tuner = Tuner(
            runner, used, methods, ks, lambda what: status.update(f"measuring {escape(what)}")
        )
        start = loaded.pair.k
        try:
            for count in counts:
                best[count] = tuner.tune(count, start)
                start = best[count].k or start
        finally:
            runner.close()
    return tuner, best


def keep(
    loaded: "LoadedPair",
    tuner: "Tuner",
    best: "dict[int, Best]",
    price: float | None,
    max_tokens: int,
) -> Path:
    from peagle import __version__
    from peagle.bench.results import now
    from peagle.bench.tune import entries
    from peagle.catalog.tuned import machine_of, write_tuned

    measured = [
        {"concurrency": c, "method": method, "k": k, "output_throughput": round(p.throughput, 2)}
        for (method, k, c), p in tuner.points.items()
    ]
    entry = {
        "created": now(),
        "peagle": __version__,
        "max_tokens": max_tokens,
        "price": price,
        "by_concurrency": entries(tuner, best, price),
        "acceptance": {
            method: [round(rate, 4) for rate in rates] for method, rates in tuner.rates.items()
        },
        "measured": measured,
    }
    return write_tuned(loaded.pair, machine_of(loaded.target.device, loaded.target.dtype), entry)

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, out, warn
from peagle.cli.options import (
    Device,
    Drafter,
    Dtype,
    Exact,
    Int8,
    Json,
    MaxTokens,
    Method,
    Target,
    Tree,
)
from peagle.core import check_k, parse_method
from peagle.errors import UserError
from peagle.paths import write_json

if TYPE_CHECKING:
    from peagle.core import Method as MethodName
    from peagle.data.bench import Task
    from peagle.evaluate.evaluate import EvaluateSettings, Evaluation
    from peagle.loaded import LoadedPair

Number = TypeVar("Number", int, float)


@app.command()
def evaluate(
    pair: Annotated[str, typer.Argument(help="The pair.")] = DEFAULT_PAIR,
    sets: Annotated[
        str, typer.Option("--set", help="Names or JSONL files with `turns`, separated by commas.")
    ] = "humaneval,mt_bench,gsm8k",
    k: Annotated[
        str | None,
        typer.Option(
            "-k", "--k", help="One or more K: 3,5,7. Default: the pair's.", show_default=False
        ),
    ] = None,
    tree: Tree = 0,
    limit: Annotated[
        int | None,
        typer.Option("--limit", help="Only the first N tasks of each set.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="The folder with NAME.jsonl (or .jsonl.gz). Default: PEAGLE_DATA, else data in PEAGLE_HOME.",
            show_default=False,
        ),
    ] = None,
    method: Method = None,
    drafter: Drafter = None,
    temperature: Annotated[
        str, typer.Option("--temperature", help="One or more: 0 is greedy, 0,1 is both.")
    ] = "0",
    max_tokens: MaxTokens = 256,
    target: Target = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    exact: Exact = None,
    int8: Int8 = False,
    fast: Annotated[
        bool,
        typer.Option(
            "--jump", help="Without decoding: answers in batches, then a walk along the matches."
        ),
    ] = False,
    as_vllm: Annotated[
        bool,
        typer.Option(
            "--as-vllm", help="The drafter as vLLM would run it, without what that cannot serve."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Of the first task; the next have the numbers after it.")
    ] = 0,
    as_json: Json = False,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Write the JSON to this file as well.", show_default=False),
    ] = None,
) -> None:
    """Measure the acceptance length of a pair on benchmark sets, by decoding them (--jump: whole sets, faster).

    Example: peagle evaluate smollm2-135m --set mt_bench,gsm8k -k 3,5,7 --limit 20 --data bench/
    """
    from peagle.data.bench import read_sets
    from peagle.evaluate.evaluate import EvaluateSettings

    ks = tuple(check_k(one) for one in numbers(k, int, "-k 3,5,7")) if k is not None else ()
    temperatures = numbers(temperature, float, "--temperature 0,1")
    wanted = parse_method(method or "p-eagle")
    asked = EvaluateSettings(
        ks, temperatures, wanted, max_tokens, seed, exact, int8, tree
    )  # refused before anything is loaded
    if fast and exact is not None:
        raise UserError("--jump decodes nothing, so nothing can be exact: leave out one of the two")
    if fast and int8:
        raise UserError("--jump runs the target as it is: leave out one of --jump and --int8")
    if to is not None and to.expanduser().is_dir():
        raise UserError(f"{to} is a folder: give --out a file")
    tasks = read_sets([word.strip() for word in sets.split(",") if word.strip()], data, limit, warn)
    from peagle.loaded import load
    from peagle.progress import progress_bars

    with progress_bars(err, quiet=as_json) as progress:
        loaded = load(
            pair, target=target, drafter=drafter, device=device, dtype=dtype, progress=progress
        )
    used = (
        loaded.pair.method if method is None else wanted
    )  # a drafter's folder brings its own method
    if as_vllm:
        loaded = plain(loaded, used)
    settings = replace(asked, ks=ks or (loaded.pair.k,), method=used)
    found = run(loaded, tasks, settings, fast)
    if not found.trained:
        warn(f"the {found.settings.method} drafter of this pair is untrained: its drafts are noise")
    told = found.as_dict() | ({"as_vllm": True} if as_vllm else {})
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
    else:
        show(found, out)
    if to is not None:
        write_json(to.expanduser(), told)


def plain(loaded: "LoadedPair", method: "MethodName") -> "LoadedPair":
    """The pair with its drafter as vLLM would run it."""
    from peagle.export.vllm_subset import subset_notice, vllm_subset
    from peagle.loaded import LoadedPair

    drafter = loaded.drafter(method)
    warn(
        subset_notice(drafter.config)
        or "vLLM runs this drafter as it is: --as-vllm changes nothing"
    )
    return LoadedPair(loaded.pair, loaded.target, {method: vllm_subset(drafter)})


def numbers(text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """The numbers of a comma list, each once."""
    try:
        found = tuple(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError as error:
        raise UserError(f"{text!r} is no list of numbers: write it like {example}") from error
    return found


def run(
    loaded: "LoadedPair", tasks: "dict[str, list[Task]]", settings: "EvaluateSettings", fast: bool
) -> "Evaluation":
    """With a bar on stderr."""
    from peagle.evaluate.evaluate import evaluate as measure_all

    loaded.drafter(settings.method)  # what cannot be loaded is told before the bar is drawn
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        total = sum(map(len, tasks.values())) * len(settings.ks) * len(settings.temperatures)
        task = bar.add_task(
            "decoding", total=2 * len(tasks) * len(settings.temperatures) if fast else total
        )

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=escape(what))

        if fast:
            from peagle.evaluate.offline_acceptance import offline_acceptance

            return offline_acceptance(loaded, tasks, settings, advance)
        return measure_all(loaded, tasks, settings, warn, advance)


def show(found: "Evaluation", console: Console) -> None:
    """A table for each temperature: a row a set, a column a K; then the accepted share of every position."""
    how = found.settings
    trees = f" tree {how.tree}" if how.tree else ""
    for temperature in how.temperatures:
        sampled = f"temperature {temperature:g}" if temperature else "greedy"
        console.print(
            f"acceptance length, {how.method}{trees}, {sampled}, {found.dtype}:", highlight=False
        )
        table = Table("set", *(f"K={k}" for k in how.ks))
        rows = {result.set: [""] * len(how.ks) for result in found.results}
        for column, k in enumerate(how.ks):
            for result in found.of(k, temperature):
                rows[result.set][column] = f"{result.acceptance_length:.2f}"
        for name, cells in rows.items():
            table.add_row(escape(name), *cells, end_section=name == list(rows)[-1])
        table.add_row("mean", *(f"{found.mean(k, temperature):.2f}" for k in how.ks))
        console.print(table)
        for result in (result for k in how.ks for result in found.of(k, temperature)):
            shares = " ".join(f"{share:.2f}" for share in result.accepted_per_position)
            line = f"{result.set} K={result.k}, accepted by position: {shares}"
            console.print(
                f"{escape(line)} ({result.drafts} drafts, {result.tokens} tokens)",
                highlight=False,
                soft_wrap=True,
            )

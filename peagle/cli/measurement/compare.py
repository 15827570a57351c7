import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from peagle.cli.application import app, err, out, warn
from peagle.cli.options import Json

if TYPE_CHECKING:
    from peagle.report.compare import Change

COLOURS = {"worse": "bold red", "gone": "bold red", "better": "green", "noise": "yellow"}


@app.command()
def compare(
    before: Annotated[
        Path, typer.Argument(metavar="A.json", help="A result of `peagle bench`: what was.")
    ],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another: what is.")],
    threshold: Annotated[
        str, typer.Option("--threshold", help="How much worse is a regression: 5% or 0.05.")
    ] = "5%",
    metric: Annotated[
        str, typer.Option("--metric", help="vLLM's names, with commas.")
    ] = "output_throughput",
    strict: Annotated[
        bool, typer.Option("--strict", help="Count a drop even if the spreads overlap.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Compare different targets.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two results cell by cell. Exit code 1 if something got worse by more than the threshold.

    noise: worse or better, but the runs' spreads overlap. Example: peagle compare before.json after.json
    """
    from peagle.report import compare as how
    from peagle.results.runs import read_run

    limit, metrics = how.parse_threshold(threshold), how.parse_metrics(metric)
    one, two = read_run(before), read_run(after)
    if not force:
        how.refuse_other_target(one, two)
    changes = how.compare(one, two, metrics, limit, strict)
    how.remarks(one, two, warn)
    worse = how.regressions(changes)
    if as_json:
        told = {
            "a": str(before),
            "b": str(after),
            "threshold": limit,
            "metrics": metrics,
            "strict": strict,
        }
        told |= {"regressions": len(worse), "changes": [change.as_dict() for change in changes]}
        print(json.dumps(told))
    else:
        out.print(table(changes))
        summary(changes, worse, limit)
    if worse:
        raise typer.Exit(1)


def table(changes: "list[Change]") -> Table:
    from peagle.report.words import DASH, amount, label

    shown = Table("set", "method", "c", "metric", "A", "B", "B / A", "spread", "")
    for change in changes:
        cell, color = change.cell, COLOURS.get(change.outcome, "")
        ratio = DASH if change.ratio is None else f"{change.ratio:.3f}"
        known = change.low is not None and change.high is not None and change.low != change.high
        spread = f"{change.low:.2f} to {change.high:.2f}" if known else DASH
        shown.add_row(
            escape(cell.set),
            escape(label(cell)),
            str(cell.concurrency),
            change.metric,
            amount(change.before),
            amount(change.after),
            ratio,
            spread,
            f"[{color}]{change.outcome}[/]" if color else change.outcome,
        )
    return shown


def summary(changes: "list[Change]", worse: "list[Change]", limit: float) -> None:
    for change in worse:
        told = (
            "no longer there"
            if change.ratio is None or change.outcome == "gone"
            else f"{change.ratio:.3f} of before"
        )
        err.print(
            f"[bold red]regression:[/] {escape(change.name)} {told}",
            highlight=False,
            soft_wrap=True,
        )
    noise = sum(change.outcome == "noise" for change in changes)
    tail = f"; {noise} within both spreads" if noise else ""
    unknown = sum(change.outcome == "unknown" for change in changes)
    tail += f"; {unknown} not measured" if unknown else ""
    out.print(
        f"{len(worse)} of {len(changes)} worse by more than {limit:.1%}{tail}", highlight=False
    )

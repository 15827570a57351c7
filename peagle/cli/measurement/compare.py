import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from peagle.cli.application import app, err, out, warn
from peagle.cli.options import Json

if TYPE_CHECKING:
    from peagle.report.compare import Change

OUTCOME_STYLES = {"worse": "bold red", "gone": "bold red", "better": "green", "noise": "yellow"}

FileBefore = Annotated[
    Path, typer.Argument(metavar="A.json", help="A result of `peagle bench`: the old one.")
]
FileAfter = Annotated[Path, typer.Argument(metavar="B.json", help="The new result.")]
Threshold = Annotated[
    str, typer.Option("--threshold", help="How much worse is a regression: 5% or 0.05.")
]
MetricNames = Annotated[
    str, typer.Option("--metric", help="vLLM's metric names, separated by commas.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Count a drop even if the spreads overlap.")]
Force = Annotated[bool, typer.Option("--force", help="Compare different targets.")]


@app.command()
def compare(
    before: FileBefore,
    after: FileAfter,
    threshold: Threshold = "5%",
    metric: MetricNames = "output_throughput",
    strict: Strict = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare two results cell by cell. Exit code 1 if something got worse beyond the threshold.

    noise: worse or better, but the runs' spreads overlap.

    Example: peagle compare before.json after.json
    """
    from peagle.report import compare as comparison
    from peagle.results.run_file import read_result

    limit = comparison.parse_threshold(threshold)
    metrics = comparison.parse_metrics(metric)
    old = read_result(before)
    new = read_result(after)
    if not force:
        comparison.require_same_target(old, new)
    changes = comparison.compare_results(old, new, metrics, limit, strict)
    comparison.warn_about_conditions(old, new, warn)
    worse = comparison.regressions(changes)
    if as_json:
        content = {
            "a": str(before),
            "b": str(after),
            "threshold": limit,
            "metrics": metrics,
            "strict": strict,
            "regressions": len(worse),
            "changes": [change.to_json() for change in changes],
        }
        print(json.dumps(content))
    else:
        out.print(change_table(changes))
        print_summary(changes, worse, limit)
    if worse:
        raise typer.Exit(1)


def change_table(changes: "list[Change]") -> Table:
    from peagle.report.words import DASH, amount, cell_label

    names = ("set", "method", "c", "metric", "A", "B", "B / A", "spread", "")
    table = Table(*names, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for change in changes:
        style = OUTCOME_STYLES.get(change.outcome, "")
        has_spread = (
            change.low is not None and change.high is not None and change.low != change.high
        )
        table.add_row(
            escape(change.cell.set),
            escape(cell_label(change.cell)),
            str(change.cell.concurrency),
            change.metric,
            amount(change.before),
            amount(change.after),
            DASH if change.ratio is None else f"{change.ratio:.3f}",
            f"{change.low:.2f} to {change.high:.2f}" if has_spread else DASH,
            f"[{style}]{change.outcome}[/]" if style else change.outcome,
        )
    return table


def print_summary(changes: "list[Change]", worse: "list[Change]", limit: float) -> None:
    for change in worse:
        gone = change.ratio is None or change.outcome == "gone"
        text = "no longer there" if gone else f"{change.ratio:.3f} of before"
        err.print(
            f"[bold red]regression:[/] {escape(change.name)} {text}",
            highlight=False,
            soft_wrap=True,
        )
    noise = sum(change.outcome == "noise" for change in changes)
    unknown = sum(change.outcome == "unknown" for change in changes)
    summary = f"{len(worse)} of {len(changes)} worse by more than {limit:.1%}"
    summary += f"; {noise} within both spreads" if noise else ""
    summary += f"; {unknown} not measured" if unknown else ""
    out.print(summary, highlight=False)

"""What `peagle bench` prints: progress, failures, the table, scores."""

from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from peagle.cli.application import err, out, warn

if TYPE_CHECKING:
    from peagle.bench.session import Session
    from peagle.results.cell import BenchCell
    from peagle.results.quality import Score
    from peagle.results.run_file import BenchResult

COLUMNS = (
    "set",
    "method",
    "K",
    "c",
    "tokens/s",
    "spread",
    "user",
    "TTFT",
    "TPOT",
    "AL",
    "identical",
)


def print_line(text: str) -> None:
    err.print(escape(text), highlight=False, soft_wrap=True)


def print_error(text: str) -> None:
    err.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, transient=True)


def follow_session(session: "Session", bar: Progress) -> None:
    """Show the progress of a session in a bar, or in lines off a terminal, and its failures."""
    from peagle.bench.session import SessionCallbacks

    task = bar.add_task("starting", total=session.max_requests(session.pending))

    def show_activity(activity: str) -> None:
        bar.update(task, description=escape(activity))
        if not err.is_terminal:
            print_line(activity)

    session.callbacks = SessionCallbacks(
        on_start=show_activity,
        on_request=lambda: bar.advance(task),
        on_cell=warn_about_failures,
    )


def warn_about_failures(cell: "BenchCell") -> None:
    if cell.failed:
        name = f"{cell.set} {cell.variant} c={cell.concurrency}"
        warn(
            f"{name}: {cell.failed} of {cell.requests} requests failed,"
            f" the first with: {cell.first_error}"
        )


def show_result(result: "BenchResult") -> None:
    """Print the table, the scores and the path. Exit code 1 if every request failed."""
    from peagle.bench.session import common_error

    out.print(result_table(result))
    for score in result.scores:
        out.print(escape(score_text(score)), highlight=False)
    out.print(escape(str(result.path)), highlight=False, soft_wrap=True)
    error = common_error(result.cells)
    if error is not None:
        print_error(f"every request failed, the first with: {error}")
        raise typer.Exit(1)


def result_table(result: "BenchResult") -> Table:
    columns = (Column(name, no_wrap=True) for name in COLUMNS)
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for cell in result.cells:
        table.add_row(*row_texts(cell))
    return table


def row_texts(cell: "BenchCell") -> list[str]:
    rate = cell.output_throughput or 0.0
    low, high = cell.output_throughput_spread or (rate, rate)
    user_metrics = (cell.per_user_throughput, cell.median_ttft_ms, cell.median_tpot_ms)
    length = cell.spec_decode_acceptance_length
    check = cell.check
    return [
        escape(cell.set),
        escape(cell.variant),
        str(cell.k or ""),
        str(cell.concurrency),
        f"{rate:,.1f}",
        f"{(high - low) / rate:.0%}" if rate else "-",
        *(f"{value:,.1f}" if value is not None else "-" for value in user_metrics),
        f"{length:.2f}" if length is not None else "",
        f"{check.identical} of {check.compared}" if check else "",
    ]


def score_text(score: "Score") -> str:
    from peagle.results.key import draft_label

    form = draft_label(score.method, score.k, score.tree)
    return f"{score.set} {form}: {score.metric} {score.value:.1%} of {score.of}"

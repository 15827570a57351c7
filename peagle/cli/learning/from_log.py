import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from peagle.cli.application import err, out, warn
from peagle.cli.learning.group import learn_app
from peagle.cli.options import Drafter, Method, Target

if TYPE_CHECKING:
    from peagle.learn.offline.offline_learner import OfflineLearner
    from peagle.learn.versions import VersionRecord

MAX_REPORTED_LINES = 10


@learn_app.command("from-log")
def from_log(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG", help="JSONL files of requests and answers (OpenAI API)."),
    ],
    pair: Annotated[str, typer.Option("--pair", help="The pair whose drafter learns.")],
    to: Annotated[Path, typer.Option("--out", help="The learn folder: documents and versions.")],
    target: Target = None,
    drafter: Drafter = None,
    method: Method = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="Folder of `peagle regenerate` answers to keep in mind."),
    ] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the log.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Learn from the log of an OpenAI-compatible server: from requests and answers to a drafter.

    Ctrl-C saves the state; the same command resumes. A line of LOG is {"request": {...},
    "response": {...}} with the bodies of the API, or a line of OpenAI's batch files.

    Example: peagle learn from-log log.jsonl --pair smollm2-135m --out learned
    """
    from peagle.core import parse_method
    from peagle.learn.offline.offline_learner import OfflineLearner, OfflineOptions
    from peagle.learn.settings import LearnerSettings

    settings = LearnerSettings(
        pair=pair,
        target=target,
        drafter=None if drafter is None else str(drafter),
        device=device,
        method=None if method is None else parse_method(method),
        replay=None if replay is None else str(replay),
    )
    with closing(OfflineLearner(to, settings, OfflineOptions(epochs, lr))) as learner:
        import_logs(learner, logs)
        print_version(train(learner), learner)


def import_logs(learner: "OfflineLearner", logs: list[Path]) -> None:
    reported: list[str] = []

    def report(line: str) -> None:
        reported.append(line)
        if len(reported) <= MAX_REPORTED_LINES:
            warn(line)

    with Progress(TextColumn("reading"), MofNCompleteColumn(), console=err) as bar:
        task = bar.add_task("reading", total=None)
        counts = learner.import_logs(logs, report, lambda done: bar.update(task, completed=done))
    if len(reported) > MAX_REPORTED_LINES:
        warn(f"{len(reported) - MAX_REPORTED_LINES} more lines were skipped")
    err.print(
        f"{counts.documents} new answers, {counts.known} known ones,"
        f" {counts.skipped} lines skipped",
        highlight=False,
    )


def train(learner: "OfflineLearner") -> "VersionRecord | None":
    """Train and judge with a progress bar; the first Ctrl-C saves the state."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    previous = signal.signal(signal.SIGINT, learner.job.stop)
    try:
        with Progress(*columns, console=err) as bar:
            task = bar.add_task("training", total=None, loss="")

            def show(step: int, total: int, loss: float) -> None:
                bar.update(task, completed=step, total=total, loss=f"loss {loss:.3f}")

            return learner.learn(show)
    finally:
        signal.signal(signal.SIGINT, previous)


def print_version(record: "VersionRecord | None", learner: "OfflineLearner") -> None:
    from peagle.learn.versions import version_folder

    if record is None:
        out.print("stopped: run the same command again to resume")
        raise typer.Exit(130)
    out.print(record.reason, highlight=False, soft_wrap=True)
    if record.state == "rejected":
        out.print("the drafter stays as it was", highlight=False)
        return
    folder = version_folder(learner.folder, record.number)
    out.print(f"the better drafter is {folder}", highlight=False, soft_wrap=True)

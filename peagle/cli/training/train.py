import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle.cli.application import app, err, warn
from peagle.cli.training.options import StopAfter
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.train.plan import Plan
    from peagle.train.records import StepRecord
    from peagle.train.run import TrainRun


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML or TOML.", metavar="FILE", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value; replaces the file's value.", show_default=False),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key, and stop.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print memory and time, and stop.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write an untrained checkpoint, and stop.")
    ] = False,
    stop_after: StopAfter = None,
) -> None:
    """Train a drafter: P-EAGLE or EAGLE-3, by `method`. A stopped run resumes where it was.

    Example: peagle train --config train.yaml --set method=eagle3 --set out=run3
    Several GPUs: torchrun --nproc-per-node 8 -m peagle train --config train.yaml
    """
    from peagle.train.config import read_config, to_yaml

    settings = read_config(config, dict(map(parse_change, changes or [])))
    if print_config:
        print(to_yaml(settings), end="")
        return
    from peagle.train import run as training

    if dry_run:
        print(f"wrote an untrained drafter to {training.dry_run(settings)}")
        return
    run = training.TrainRun(settings, warn)
    if run.world.is_main:
        print_plan(run.plan())
    if plan:
        return
    train_run(run, stop_after)
    if run.world.size == 1:
        options = [f"--set {change}" for change in changes or []]
        publish_run(run, " ".join(["peagle train --config train.yaml", *options]))
    elif run.world.is_main:
        print(f"{run.trainer.out / 'drafter'}")


def print_plan(plan: "Plan") -> None:
    for line in plan.lines():
        err.print(line, highlight=False)
    if not plan.fits:
        warn(
            "this is more memory than is free: raise `segments`, set checkpointing,"
            " or lower pack_tokens"
        )


def train_run(run: "TrainRun", stop_after: float | None) -> None:
    """Train with a progress bar; exit if the run stops before its last step."""
    seconds = math.inf if stop_after is None else 60 * stop_after
    with TrainingBar(quiet=not run.world.is_main) as progress:
        done = run.train(progress, warn, seconds)
    if not done:
        trainer = run.trainer
        print(f"stopped after step {trainer.step} of {trainer.total_steps}: run again to resume")
        raise typer.Exit(130 if trainer.stopping else 0)


def publish_run(run: "TrainRun", command: str) -> Path:
    """Publish the drafter and print its folder and acceptance length."""
    from peagle.train.publish import publish

    folder, length = publish(run, [command])
    if length is None:
        print(f"{folder}: no answers were held out to measure it")
    else:
        print(f"{folder}: acceptance length {length:.2f}, held-out, K={run.config.logged_k}")
    return folder


def parse_change(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise UserError(f"cannot read --set {word!r}: write key=value")
    return key.strip(), value.strip()


class TrainingBar:
    """A progress bar with the loss and the remaining time."""

    def __init__(self, quiet: bool) -> None:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=err, disable=quiet)

    def __enter__(self) -> "TrainingBar":
        self.bar.__enter__()
        self.task = self.bar.add_task("training", total=None, loss="")
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int, record: "StepRecord") -> None:
        loss = f"loss {record.loss:.3f}, {record.seconds_per_step * 1000:.0f} ms a step"
        self.bar.update(self.task, completed=done, total=total, loss=loss)

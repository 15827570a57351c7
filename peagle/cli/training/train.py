import math
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle.cli.application import app, err, warn
from peagle.errors import UserError


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML or TOML.", metavar="FILE", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, over the file's.", show_default=False),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key, and stop.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Tell memory and time, and stop.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write an untrained checkpoint, and stop.")
    ] = False,
    stop_after: Annotated[
        float | None,
        typer.Option("--stop-after", help="Minutes; run again to go on.", show_default=False),
    ] = None,
) -> None:
    """Train a drafter: P-EAGLE or EAGLE-3, by `method`. Stopped at any point, it goes on where it was.

    Example: peagle train --config train.yaml --set method=eagle3 --set out=run3
    Several GPUs: torchrun --nproc-per-node 8 -m peagle train --config train.yaml
    """
    from peagle.train.config import as_yaml, read_config

    settings = read_config(config, dict(map(parse_change, changes or [])))
    if print_config:
        print(as_yaml(settings), end="")
        return
    from peagle.train import run

    if dry_run:
        print(f"wrote an untrained drafter to {run.dry_run(settings)}")
        return
    job = run.TrainRun(settings, warn)
    if job.world.first:
        told = job.plan()
        for line in told.lines():
            err.print(line, highlight=False)
        if not told.fits:
            warn(
                "that is more memory than is free: raise `segments`, set checkpointing, or lower pack_tokens"
            )
    if plan:
        return
    with shown(quiet=not job.world.first) as progress:
        done = job.train(progress, warn, seconds(stop_after))
    if not done:
        print(f"stopped after step {job.trainer.step}: run again to go on")
        raise typer.Exit(130 if job.trainer.stopping else 0)
    if job.world.size == 1:
        from peagle.train.publish import publish

        folder, length = publish(
            job,
            [
                " ".join(
                    [
                        "peagle train --config train.yaml",
                        *(f"--set {word}" for word in changes or []),
                    ]
                )
            ],
        )
        print(f"{folder}: {measured(length, settings.eval_k)}")
    elif job.world.first:
        print(f"{job.trainer.out / 'drafter'}")


def seconds(minutes: float | None) -> float:
    return math.inf if minutes is None else 60 * minutes


def measured(length: float | None, k: int) -> str:
    return (
        "nothing was held out to measure it"
        if length is None
        else f"acceptance length {length:.2f}, held-out, K={k}"
    )


def parse_change(word: str) -> tuple[str, str]:
    key, found, value = word.partition("=")
    if not found:
        raise UserError(f"cannot read --set {word!r}: write key=value")
    return key.strip(), value.strip()


class shown:
    """A bar with the loss and the time left."""

    def __init__(self, quiet: bool) -> None:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=err, disable=quiet)

    def __enter__(self) -> "shown":
        self.bar.__enter__()
        self.task = self.bar.add_task("training", total=None, loss="")
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int, measured: dict[str, float]) -> None:
        loss = f"loss {measured['loss']:.3f}, {measured['seconds_per_step'] * 1000:.0f} ms a step"
        self.bar.update(self.task, completed=done, total=total, loss=loss)

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.application import app, err, warn
from peagle.cli.options import Device
from peagle.core import parse_method
from peagle.errors import UserError


@app.command("make-drafter")
def make_drafter(
    target: Annotated[str, typer.Argument(help="A pair's name, a folder or a hub id.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="JSONL: `turns` or `prompt`.", metavar="FILE", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where everything goes; run again to go on.")
    ] = Path("drafter"),
    method: Annotated[str, typer.Option("--method", help="p-eagle or eagle3.")] = "p-eagle",
    limit: Annotated[
        int | None, typer.Option("--limit", help="So many prompts.", show_default=False)
    ] = None,
    invent: Annotated[
        int, typer.Option("--invent", help="So many prompts the target writes itself.")
    ] = 0,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the answers.")] = 6.0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of the training config.", show_default=False),
    ] = None,
    stop_after: Annotated[
        float | None,
        typer.Option(
            "--stop-after", help="Minutes of training; run again to go on.", show_default=False
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Make a drafter for a target: it answers the prompts, a drafter learns from the answers, and is measured.

    Every stage goes on where it was stopped. Example: peagle make-drafter smollm2-135m --prompts prompts.jsonl
    """
    wanted = parse_method(method)
    if wanted == "none":
        raise UserError("there is no drafter for method none: use p-eagle or eagle3")
    if prompts is None and invent < 1:
        raise UserError("nothing to learn from: give --prompts FILE, or --invent N")
    from peagle.cli.training.regenerate import regenerate
    from peagle.cli.training.train import measured, parse_change, seconds, shown
    from peagle.loaded import load
    from peagle.train.config import read_config
    from peagle.train.make import free_cuda_bytes, recipe
    from peagle.train.publish import publish
    from peagle.train.run import TrainRun

    loaded = load(target, device=device, dtype="auto").target
    chosen = recipe(loaded, target, wanted, out.expanduser(), epochs, free_cuda_bytes(loaded))
    config = read_config(
        None, asdict(chosen.config) | {"device": device} | dict(map(parse_change, changes or []))
    )
    del loaded
    err.print("[bold]1. answers[/]")
    regenerate(
        out=out / "answers",
        prompts=prompts,
        target=target,
        max_tokens=chosen.max_tokens,
        max_prompt=config.max_length // 2,
        limit=limit,
        invent=invent,
        keep_truncated=True,
        device=device,
    )
    err.print("[bold]2. training[/]")
    run = TrainRun(config, warn)
    for line in run.plan().lines():
        err.print(line, highlight=False)
    with shown(quiet=False) as progress:
        done = run.train(progress, warn, seconds(stop_after))
    if not done:
        print(f"stopped after step {run.trainer.step} of {run.trainer.total}: run again to go on")
        raise typer.Exit(130 if run.trainer.stopping else 0)
    err.print("[bold]3. measuring[/]")
    told = [f"--limit {limit}"] * (limit is not None) + [f"--invent {invent}"] * (invent > 0)
    told += [f"--set {change}" for change in changes or []]
    command = (
        f"peagle make-drafter {target} --prompts PROMPTS --method {wanted} --epochs {epochs:g}"
    )
    folder, length = publish(run, [" ".join([command, *told])])
    print(f"{folder}: {measured(length, config.eval_k)}")
    print(f"try it: peagle generate {target} 'Hello' --drafter {folder}")

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.application import app, err, warn
from peagle.cli.options import Device
from peagle.cli.training.options import (
    AnswerMinutes,
    Invent,
    Long,
    PromptFile,
    PromptLimit,
    Validation,
)
from peagle.core import DRAFTER_METHODS, parse_method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.core import Method
    from peagle.train.config import TrainConfig


@app.command("make-drafter")
def make_drafter(
    target: Annotated[str, typer.Argument(help="A pair's name, a folder or a hub id.")],
    prompts: PromptFile = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of all files; run again to resume.")
    ] = Path("drafter"),
    method: Annotated[str, typer.Option("--method", help="p-eagle or eagle3.")] = "p-eagle",
    limit: PromptLimit = None,
    invent: Invent = 0,
    long: Long = 0,
    validation: Validation = 0,
    answer_minutes: AnswerMinutes = None,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the answers.")] = 6.0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of the training config.", show_default=False),
    ] = None,
    stop_after: Annotated[
        float | None,
        typer.Option(
            "--stop-after", help="Minutes of training; run again to resume.", show_default=False
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Make a drafter for a target: generate answers, train on them, measure the result.

    Every stage resumes. Example: peagle make-drafter smollm2-135m --prompts prompts.jsonl
    """
    from peagle.cli.training.regenerate import check_prompt_options, regenerate
    from peagle.cli.training.train import print_plan, publish_run, train_run
    from peagle.train.run import TrainRun

    check_prompt_options(prompts, invent, limit, validation)
    parsed_method = check_options(method, answer_minutes)
    config, max_tokens = choose_config(
        target, parsed_method, out, epochs, device, long, changes or []
    )
    check_init(config)
    err.print("[bold]1. answers[/]")
    has_started = has_state(out.expanduser(), config)
    if has_started:
        err.print("training has started: no more answers")
    regenerate(
        out=out / "answers",
        prompts=prompts,
        target=target,
        max_tokens=max_tokens,
        max_prompt=config.max_length // 2,
        limit=limit,
        invent=invent,
        long=long,
        validation=validation,
        keep_truncated=True,
        stop_after=0 if has_started else answer_minutes,
        context=config.context or None,
        device=device,
    )
    err.print("[bold]2. training[/]")
    run = TrainRun(config, warn)
    print_plan(run.plan())
    train_run(run, stop_after)
    err.print("[bold]3. measuring[/]")
    numbers: dict[str, float | None] = {"limit": limit, "invent": invent, "long": long}
    numbers |= {"validation": validation, "answer-minutes": answer_minutes}
    start = f"peagle make-drafter {target} --prompts PROMPTS --method {parsed_method}"
    folder = publish_run(run, card_command(start, numbers | {"epochs": epochs}, changes or []))
    print(f"try it: peagle generate {target} 'Hello' --drafter {folder}")


def check_options(method: str, answer_minutes: float | None) -> "Method":
    parsed_method = parse_method(method)
    if parsed_method not in DRAFTER_METHODS:
        raise UserError(f"there is no drafter for method {method}: use p-eagle or eagle3")
    if answer_minutes is not None and not answer_minutes > 0:
        raise UserError(f"--answer-minutes is {answer_minutes:g}: use more than 0, or leave it out")
    return parsed_method


def check_init(config: "TrainConfig") -> None:
    """A wrong folder ends the command before the answers are generated."""
    from peagle.drafter.formats import checkpoint

    if config.continues:
        checkpoint.read(Path(config.init).expanduser())


def card_command(start: str, numbers: dict[str, float | None], changes: list[str]) -> str:
    """The command in the drafter's card; options that are None or 0 are left out."""
    words = [start, *(f"--{name} {number}" for name, number in numbers.items() if number)]
    return " ".join([*words, *(f"--set {change}" for change in changes)])


def has_state(out: Path, config: "TrainConfig") -> bool:
    """Whether training by any method has started: to resume, it needs the same answers."""
    from peagle.train.state import list_states

    runs = [Path(config.out).expanduser(), *(out / method for method in DRAFTER_METHODS)]
    return any(list_states(run / "state") for run in runs)


def choose_config(
    target: str,
    method: "Method",
    out: Path,
    epochs: float,
    device: str,
    long: int,
    changes: list[str],
) -> tuple["TrainConfig", int]:
    """The training config and the length of the answers; the target is loaded to choose them."""
    from peagle.cli.training.train import parse_change
    from peagle.loaded import load
    from peagle.train.config import read_config
    from peagle.train.make import choose_recipe, free_cuda_bytes

    loaded = load(target, device=device, dtype="auto", stored=False).target
    recipe = choose_recipe(
        loaded, target, method, out.expanduser(), epochs, free_cuda_bytes(loaded)
    )
    overrides = asdict(recipe.config) | {"device": device}
    if long:  # A pack holds the longest conversation.
        pack_tokens = max(recipe.config.pack_tokens, long)
        overrides |= {"max_length": long, "pack_tokens": pack_tokens}
    own = dict(map(parse_change, changes))
    if own.get("init", "target") not in ("target", "random"):
        overrides["sliding_window"] = 0  # That of the drafter in init, unless `changes` has one.
    return read_config(None, overrides | own), recipe.max_tokens

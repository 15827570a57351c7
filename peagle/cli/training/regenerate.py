import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, warn
from peagle.cli.options import Context, Device, Dtype, Json, MaxTokens
from peagle.cli.training.options import (
    Invent,
    Long,
    PromptFile,
    PromptLimit,
    StopAfter,
    Validation,
)
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.regenerate import job
    from peagle.regenerate.answers import Counts
    from peagle.regenerate.prompts import Prompt
    from peagle.target import Target


@app.command()
def regenerate(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of the answers; run again to resume.", metavar="DIR"),
    ],
    prompts: PromptFile = None,
    target: Annotated[
        str, typer.Option("--target", help="A target: a pair's name or a folder.")
    ] = DEFAULT_PAIR,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", help="OpenAI-compatible URL that answers instead.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Name of the target at the endpoint.", show_default=False),
    ] = None,
    temperature: Annotated[
        str, typer.Option("--temperature", help="0 is greedy; 0,0.8 answers each prompt at both.")
    ] = "0",
    max_tokens: MaxTokens = 512,
    max_prompt: Annotated[
        int, typer.Option("--max-prompt", help="Tokens of the longest prompt, history included.")
    ] = 1024,
    limit: PromptLimit = None,
    invent: Invent = 0,
    long: Long = 0,
    validation: Validation = 0,
    keep_truncated: Annotated[
        bool,
        typer.Option(
            "--keep-truncated",
            help="Keep answers cut at --max-tokens, unless they repeat themselves.",
        ),
    ] = False,
    slots: Annotated[
        str, typer.Option("--slots", help="Answers decoded at the same time; auto: as many as fit.")
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="Seed of the order of prompts and of sampling.", show_default=False
        ),
    ] = None,
    stop_after: StopAfter = None,
    context: Context = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Let the target answer prompts: the training data of its drafter. Interrupted runs resume.

    Example: peagle regenerate --prompts prompts.jsonl --out answers/ --max-tokens 256
    """
    from peagle.loaded import load
    from peagle.regenerate import job
    from peagle.regenerate.long_conversations import LongSettings, long_conversations
    from peagle.regenerate.prompts import digest, parse_temperatures

    check_prompt_options(prompts, invent, limit, validation)
    temperatures = parse_temperatures(temperature)
    read: list[Prompt] = []
    held_out: list[Prompt] = []
    if prompts is not None:
        read, held_out = read_split(prompts, temperatures, limit, seed, validation)
    settings = job.RegenerateSettings(
        max_tokens=max_tokens,
        max_prompt=max(long - max_tokens, 1) if long else max_prompt,
        temperatures=temperatures,
        seed=seed or 0,
        slots=parse_slots(slots),
        keep_truncated=keep_truncated,
        prompts=digest(prompts) if prompts else "",
        long=long,
        validation=validation,
        endpoint=endpoint,
        model=model,
    )
    loaded = load(target, device=device, dtype=dtype, context=context, stored=False).target
    long_settings = LongSettings(long, max_tokens, seed or 0)
    if long:
        long_settings.check(loaded)
    if invent > 0:
        read += invent_prompts(loaded, invent, out, settings, as_json)
    if long:
        read = long_conversations(read, loaded, long_settings)
    with progress_bar("answers", as_json) as progress:
        seconds = math.inf if stop_after is None else 60 * stop_after
        counts = job.regenerate(loaded, read, out, settings, progress, seconds, held_out)
    record = {"out": str(out)} | counts.as_dict()
    print(json.dumps(record) if as_json else summary(counts, out))


def check_prompt_options(
    prompts: Path | None, invent: int, limit: int | None, validation: int
) -> None:
    if prompts is None and invent < 1:
        raise UserError("nothing to answer: give --prompts FILE, or --invent N")
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}: ask for at least one prompt")
    if validation < 0:
        raise UserError(f"--validation is {validation}: use 1 or more, or leave it out")
    if validation and prompts is None:
        raise UserError("--validation holds out prompts of a file: give --prompts FILE too")


def read_split(
    file: Path,
    temperatures: tuple[float, ...],
    limit: int | None,
    seed: int | None,
    validation: int,
) -> "tuple[list[Prompt], list[Prompt]]":
    """The first `limit` prompts to answer, and those held out, chosen from the whole file."""
    from peagle.regenerate.prompts import read_prompts, split_validation

    everything = read_prompts(file, temperatures, seed=seed, report=warn)
    training, held_out = split_validation(everything, validation)
    return training[: None if limit is None else limit * len(temperatures)], held_out


def parse_slots(word: str) -> int | None:
    if word == "auto":
        return None
    try:
        return int(word)
    except ValueError as error:
        raise UserError(f"cannot read --slots {word!r}: use auto or a number") from error


def invent_prompts(
    target: "Target", count: int, folder: Path, settings: "job.RegenerateSettings", quiet: bool
) -> "list[Prompt]":
    from peagle.regenerate.invent import invent
    from peagle.regenerate.prompts import read_prompts

    with progress_bar("prompts", quiet) as progress:
        path = invent(target, count, folder, settings.seed, settings.slots, progress)
    return read_prompts(path, settings.temperatures, count, prefix="invented:")


@contextmanager
def progress_bar(what: str, quiet: bool) -> "Iterator[job.Progress]":
    """A progress bar with tokens per second and the remaining time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=err, disable=quiet) as bar:
        task = bar.add_task(what, total=None, speed="")

        def progress(done: int, total: int, tokens: int) -> None:
            spent = bar.tasks[0].elapsed or 0.0
            speed = f"{tokens / spent:,.0f} tokens/s" if spent else ""
            bar.update(task, completed=done, total=total, speed=speed)

        yield progress


def summary(counts: "Counts", folder: Path) -> str:
    dropped = (
        ", ".join(f"{number} {reason}" for reason, number in counts.dropped.most_common()) or "none"
    )
    if counts.dropped["truncated"]:
        dropped += " (a larger --max-tokens or --keep-truncated keeps more)"
    return (
        f"{folder}: {counts.answered} answered ({counts.tokens:,} tokens), dropped: {dropped},"
        f" {counts.resumed} resumed; {counts.tokens_per_second:,.0f} tokens/s"
        f"{length_text(counts)}"
    )


def length_text(counts: "Counts") -> str:
    """The distribution of the documents' lengths, on a line of its own."""
    quantiles = [f"{name} {tokens:,}" for name, tokens in counts.length_quantiles.items()]
    return "\ntokens of a document: " + ", ".join(quantiles) if quantiles else ""

"""Prompts to answer: JSON lines with `turns` (or one `prompt`), each at every temperature."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.core import Sampling
from peagle.data.records import MAX_BROKEN, Report, ignore, read_records, require_turns
from peagle.errors import UserError
from peagle.paths import write_bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    key: str  # line@temperature, which identifies it in a resumed job
    source: str
    turns: list[str]  # of the user; the target answers each before it sees the next
    temperature: float


def read_prompts(
    path: Path,
    temperatures: Sequence[float] = (0.0,),
    limit: int | None = None,
    seed: int | None = None,
    report: Report = ignore,
    prefix: str = "",
    max_broken: int = MAX_BROKEN,
) -> list[Prompt]:
    """The first `limit` prompts in file order, or shuffled by `seed`, each once per temperature.

    Lines without a prompt are reported as file:line and skipped, up to `max_broken`.
    """
    records: list[tuple[int, str, list[str]]] = []
    broken = 0
    for line, record in read_records(path, report, max_broken):
        try:
            turns = require_turns(record, f"{path}:{line}")
        except ValueError as error:
            broken += 1
            report(f"{error}; skipped")
            if broken > max_broken:
                raise UserError(
                    f"{path}: more than {max_broken} records without a prompt, the last is {line}"
                ) from error
            continue
        records.append((line, str(record.get("source") or Path(path).name), turns))
    if not records:
        raise UserError(
            f"{path} holds no prompt: a record has 'turns', a list of texts, or one 'prompt'"
        )
    if seed is not None:
        random.Random(seed).shuffle(records)
    return [
        Prompt(f"{prefix}{line}@{temperature:g}", source, turns, temperature)
        for line, source, turns in records[:limit]
        for temperature in temperatures
    ]


def split_validation(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Hold out the `count` texts with the smallest SHA-256: (the other prompts, those held out).

    The choice depends on the texts alone: everybody who reads the same file holds out the same.
    """
    digests = [text_digest(prompt) for prompt in prompts]
    held_out = set(sorted(set(digests))[:count])
    if len(held_out) == len(set(digests)) and count:
        raise UserError(
            f"`validation` {count} leaves none of {len(held_out)} prompts to train on: lower it"
        )
    training = [p for p, digest in zip(prompts, digests, strict=True) if digest not in held_out]
    validation = [p for p, digest in zip(prompts, digests, strict=True) if digest in held_out]
    return training, validation


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write the prompts, each text once, as JSON lines that `read_prompts` reads."""
    lines = {text_digest(p): {"source": p.source, "turns": p.turns} for p in prompts}
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())


def text_digest(prompt: Prompt) -> str:
    """The SHA-256 of the user turns as a JSON list."""
    return hashlib.sha256(json.dumps(prompt.turns).encode()).hexdigest()


def parse_temperatures(words: str) -> tuple[float, ...]:
    """ "0,0.8": each prompt is answered once greedily and once at temperature 0.8."""
    try:
        temperatures = tuple(float(word) for word in words.split(","))
    except ValueError as error:
        raise UserError(
            f"cannot read `temperature` {words!r}: use numbers, as in 0 or 0,0.8"
        ) from error
    for temperature in temperatures:
        Sampling(temperature)
    if len({f"{temperature:g}" for temperature in temperatures}) < len(temperatures):
        raise UserError(f"`temperature` {words} repeats a value: name each once")
    return temperatures


def digest(path: Path) -> str:
    """The sha256 of a file: keys are line numbers, so a resumed job needs the same lines."""
    with Path(path).expanduser().open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Which prompts are answered: JSON lines with `turns` (or one `prompt`), each at every temperature."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.core import Sampling
from peagle.data.records import MAX_BROKEN, Report, ignore, read_records, require_turns
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Prompt:
    key: str  # line@temperature: what a resumed job knows it by
    source: str
    turns: list[str]  # the user's; the target answers each before it sees the next
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
    """In the file's order, or shuffled by `seed`; the first `limit` of them, each once per temperature.

    Lines that hold no prompt are reported as file:line and skipped; more than `max_broken` are refused.
    """
    found: list[tuple[int, str, list[str]]] = []
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
        found.append((line, str(record.get("source") or Path(path).name), turns))
    if not found:
        raise UserError(
            f"{path} holds no prompt: a record has `turns`, a list of texts, or one `prompt`"
        )
    if seed is not None:
        random.Random(seed).shuffle(found)
    return [
        Prompt(f"{prefix}{line}@{heat:g}", source, turns, heat)
        for line, source, turns in found[:limit]
        for heat in temperatures
    ]


def parse_temperatures(words: str) -> tuple[float, ...]:
    """ "0,0.8": each prompt is answered once greedily and once at temperature 0.8."""
    try:
        heats = tuple(float(word) for word in words.split(","))
    except ValueError as error:
        raise UserError(
            f"cannot read --temperature {words!r}: give numbers, as in 0 or 0,0.8"
        ) from error
    for heat in heats:
        Sampling(heat)
    if len({f"{heat:g}" for heat in heats}) < len(heats):
        raise UserError(f"--temperature {words} names one twice: each is sampled once")
    return heats


def digest(path: Path) -> str:
    """A file's sha256: keys are line numbers, so a resumed job must see the same lines."""
    with Path(path).expanduser().open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

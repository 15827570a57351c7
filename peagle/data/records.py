"""JSON lines, plain or gzipped. Broken lines are reported with file and line, and skipped."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peagle.errors import UserError

MAX_BROKEN = 100

Report = Callable[[str], None]


def ignore(line: str) -> None:
    pass


def read_records(
    path: Path, report: Report = ignore, max_broken: int = MAX_BROKEN
) -> Iterator[tuple[int, dict]]:
    """Yield (line number from 1, object) for every line with a JSON object; skip empty lines."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(
            f"no file {path}: give a JSONL file (or .jsonl.gz) with one record per line,"
            " or a folder that has one"
        )
    broken = valid = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"a record is an object, not {type(record).__name__}")
        except ValueError as error:
            broken += 1
            report(f"{path}:{number}: skipped, {error}")
            if broken > max_broken:
                raise UserError(
                    f"{path}: more than {max_broken} broken lines, the last is line {number}"
                ) from error
            continue
        valid += 1
        yield number, record
    if not valid:
        raise UserError(f"{path} holds no record: give a JSONL file with one record per line")


def _lines(path: Path) -> Iterator[bytes]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is not a complete gzip file ({error}): download it again"
        ) from error


def require_turns(record: dict, where: str) -> list[str]:
    """The user turns of a prompt record: `turns`, or one `prompt`."""
    turns = record.get("turns", [record["prompt"]] if "prompt" in record else None)
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError(f"{where}: `turns` must be a list of texts, none empty")
    return turns

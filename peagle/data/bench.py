"""Benchmark sets: tasks of one or more user turns, in DIR/NAME.jsonl or in any JSONL file.

A record holds `turns` (of the user, in order), one `prompt`, or `messages` in the chat layout;
recorded answers are ignored: the target gives its own. NAME:CATEGORY selects one category of a set.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.data.records import MAX_BROKEN, Report, ignore, read_records, require_turns
from peagle.data.set_names import SETS
from peagle.errors import UserError, did_you_mean
from peagle.paths import cache_home

TURN_SEEDS = 1_000_003  # distance between the seeds of a task's turns
FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
# Text of SPEED-Bench rows that its license does not allow to distribute.
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SCORING_FIELDS = ("prompt", "entry_point", "test", "answer")


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None
    # Fields of the record that scoring needs.
    extra: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def read_sets(
    words: list[str], data: Path | None = None, limit: int | None = None, report: Report = ignore
) -> dict[str, list[Task]]:
    """The tasks of every set, by name. All files are located before the first one is read."""
    if limit is not None and limit < 1:
        raise UserError(f"`limit` is {limit}: use 1 or more, or leave it out for the whole set")
    parts: dict[str, tuple[Path, str | None]] = {}
    for word in words:
        path, category = find_part(word, data)
        name = set_name(path) + (f":{category}" if category else "")
        if name in parts:
            raise UserError(
                f"set {name!r} is given twice ({parts[name][0]} and {path}): name each once"
            )
        parts[name] = path, category
    if not parts:
        raise UserError(f"no set is given: name one or more of {', '.join(SETS)}, or a JSONL file")
    return {
        name: read_tasks(path, limit, report, category) for name, (path, category) in parts.items()
    }


def set_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")


def find_part(word: str, data: Path | None = None) -> tuple[Path, str | None]:
    """The file of a set, and the category after the colon, if any."""
    name, colon, category = word.rpartition(":")
    if colon and name and category and not Path(word).expanduser().is_file():
        return find_set(name, data), category
    return find_set(word, data), None


def find_set(word: str, data: Path | None = None) -> Path:
    """The file of a set: a path, a name in the data folder, or a set that is fetched."""
    path = Path(word).expanduser()
    if word not in SETS:
        if path.is_file():
            return path
        if path.name.endswith(FILE_ENDINGS) or len(path.parts) > 1:
            raise UserError(
                f"no file {path}: give a JSONL file with `turns`, or one of {', '.join(SETS)}"
            )
    folder = data_folder(data)
    if word not in SETS:
        raise UserError(
            f"unknown set {word!r}: use one of {', '.join(SETS)} (looked for in {folder}),"
            f" or the path of a JSONL file with `turns`.{did_you_mean(word, list(SETS))}"
        )
    for ending in FILE_ENDINGS:
        if (path := folder / f"{word}{ending}").is_file():
            return path
    from peagle.data.fetch import fetch_set

    return fetch_set(word, folder)


def data_folder(folder: Path | None = None) -> Path:
    """`folder`, else `PEAGLE_DATA`, else `data` in the cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    configured = os.environ.get("PEAGLE_DATA")
    return Path(configured).expanduser() if configured else cache_home() / "data"


def read_tasks(
    path: Path, limit: int | None = None, report: Report = ignore, category: str | None = None
) -> list[Task]:
    """The first `limit` tasks of a file. Records without turns are reported and skipped."""
    tasks: list[Task] = []
    broken = 0
    categories: set[str] = set()
    ids: set[str] = set()  # Ids must be unique: answers are identified by them.
    for line, record in available_records(path, read_rows(path, report), report):
        try:
            task = parse_task(record, line)
            categories.add(str(task.category))
            if category is None or task.category == category:
                tasks.append(replace(task, id=f"{task.id}:{line}") if task.id in ids else task)
                ids.add(task.id)
        except ValueError as error:
            broken += 1
            report(f"{path}:{line}: skipped, {error}")
            if broken > MAX_BROKEN:
                raise UserError(
                    f"{path}: more than {MAX_BROKEN} records without turns, the last in {line}"
                ) from error
        if len(tasks) == limit:
            break
    if not tasks and category is not None:
        raise UserError(
            f"{path} has no task of category {category!r}: it has {', '.join(sorted(categories))}"
        )
    if not tasks:
        raise UserError(f"{path} holds no task: a record needs `turns`, a list of user texts")
    return tasks


def read_rows(path: Path, report: Report = ignore) -> Iterable[tuple[int, dict]]:
    if path.suffix != ".parquet":
        return read_records(path, report)
    from peagle.data.fetch import parquet_rows

    return enumerate(parquet_rows(path), start=1)


def available_records(
    path: Path, rows: Iterable[tuple[int, dict]], report: Report
) -> Iterator[tuple[int, dict]]:
    """Skip placeholder rows, whose text must be fetched from its source."""
    masked = available = 0
    for line, record in rows:
        if any(MASKED in str(turn) for turn in record.get("turns") or ()):
            masked += 1
            continue
        available += 1
        yield line, record
    if masked and not available:
        raise UserError(
            f"{path}: every row is a placeholder; SPEED-Bench's prepare_data.py fills them in"
        )
    if masked:
        report(
            f"{path}: {masked} placeholder rows skipped;"
            " SPEED-Bench's prepare_data.py fills them in"
        )


def parse_task(record: dict[str, Any], line: int) -> Task:
    name = record.get("id", record.get("question_id", line))
    category = record.get("category")
    fields = {
        "id": str(name),
        "category": None if category is None else str(category),
        "extra": {name: record[name] for name in SCORING_FIELDS if name in record},
    }
    if "turns" in record or "messages" not in record:
        return Task(turns=tuple(require_turns(record, f"task {name}")), **fields)  # type: ignore[arg-type]
    contents: dict[str, list[Any]] = {"system": [], "user": [], "assistant": []}
    for message in record["messages"] if isinstance(record["messages"], list) else []:
        if not isinstance(message, dict) or message.get("role") not in contents:
            raise ValueError(
                f"task {name}: a message needs a role (system, user or assistant) and content"
            )
        contents[message["role"]].append(message.get("content"))
    turns = require_turns({"turns": contents["user"]}, f"task {name}")
    if len(contents["system"]) > 1 or not all(isinstance(text, str) for text in contents["system"]):
        raise ValueError(f"task {name}: at most one system message, a text")
    return Task(turns=tuple(turns), system=next(iter(contents["system"]), None), **fields)  # type: ignore[arg-type]

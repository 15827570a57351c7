"""Benchmark sets: tasks of one or more user turns, in DIR/NAME.jsonl or in any JSONL file.

A record holds `turns` (the user's, in order), one `prompt`, or `messages` in the chat layout; there, answers that are
written down are passed over: the target gives its own. NAME:CATEGORY is a set's tasks of one category.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.data.records import MAX_BROKEN, Report, ignore, read_records, require_turns
from peagle.errors import UserError, did_you_mean
from peagle.paths import cache_home

SPEED_BENCH = ("speed_bench", *(f"speed_bench_throughput_{size}k" for size in (1, 2, 8, 16, 32)))
SETS = ("humaneval", "mt_bench", "gsm8k", "mbpp", "spec_bench", *SPEED_BENCH)
TURN_SEEDS = 1_000_003  # between the seeds of a task's turns
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # SPEED-Bench's rows that its licence keeps back
EXTRA = ("prompt", "entry_point", "test", "answer")


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None
    extra: dict[str, Any] = field(
        default_factory=dict, compare=False, repr=False
    )  # what scoring needs


def read_sets(
    words: list[str], data: Path | None = None, limit: int | None = None, report: Report = ignore
) -> dict[str, list[Task]]:
    """The tasks of every set, by its name; of a path, the file's. All is found before anything is read."""
    if limit is not None and limit < 1:
        raise UserError(f"the limit is {limit}: use --limit 1 or more, or none for the whole set")
    found: dict[str, tuple[Path, str | None]] = {}
    for word in words:
        path, category = find_part(word, data)
        name = set_name(path) + (f":{category}" if category else "")
        if name in found:
            raise UserError(
                f"set {name!r} is given twice ({found[name][0]} and {path}): name each once"
            )
        found[name] = path, category
    if not found:
        raise UserError(
            f"no set is given: use --set with one or more of {', '.join(SETS)}, or a JSONL file"
        )
    return {
        name: read_tasks(path, limit, report, category) for name, (path, category) in found.items()
    }


def set_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")


def find_part(word: str, data: Path | None = None) -> tuple[Path, str | None]:
    """A set's file, and the category after the colon where one is named."""
    name, colon, category = word.rpartition(":")
    if colon and name and category and not Path(word).expanduser().is_file():
        return find_set(name, data), category
    return find_set(word, data), None


def find_set(word: str, data: Path | None = None) -> Path:
    """The file of a set: a known name in the data folder, or a path; else from a package or the hub."""
    given = Path(word).expanduser()
    if word not in SETS:
        if given.is_file():
            return given
        if given.name.endswith(ENDINGS) or len(given.parts) > 1:
            raise UserError(
                f"no file {given}: give a JSONL file with `turns`, or one of {', '.join(SETS)}"
            )
    folder = data_folder(data)
    if word not in SETS:
        raise UserError(
            f"unknown set {word!r}: use one of {', '.join(SETS)} (looked for in {folder}),"
            f" or the path of a JSONL file with `turns`.{did_you_mean(word, list(SETS))}"
        )
    for ending in ENDINGS:
        if (path := folder / f"{word}{ending}").is_file():
            return path
    from peagle.data.fetch import fetch_set

    return fetch_set(word, folder)


def data_folder(given: Path | None = None) -> Path:
    """`given`, else `PEAGLE_DATA`, else `data` in the cache folder."""
    if given is not None:
        return Path(given).expanduser()
    chosen = os.environ.get("PEAGLE_DATA")
    return Path(chosen).expanduser() if chosen else cache_home() / "data"


def read_tasks(
    path: Path, limit: int | None = None, report: Report = ignore, category: str | None = None
) -> list[Task]:
    """The first `limit` tasks of a file, or all. Records without turns are reported and skipped, up to a point."""
    tasks: list[Task] = []
    broken, seen, ids = 0, set[str](), set[str]()  # answers are told apart by their ids
    for line, record in whole_records(path, rows_of(path, report), report):
        try:
            task = task_of(record, line)
            seen.add(str(task.category))
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
            f"{path} has no task of category {category!r}: it has {', '.join(sorted(seen))}"
        )
    if not tasks:
        raise UserError(f"{path} holds no task: a record needs `turns`, a list of the user's texts")
    return tasks


def rows_of(path: Path, report: Report = ignore) -> Iterable[tuple[int, dict]]:
    if path.suffix != ".parquet":
        return read_records(path, report)
    from peagle.data.fetch import parquet_rows

    return enumerate(parquet_rows(path), start=1)


def whole_records(
    path: Path, rows: Iterable[tuple[int, dict]], report: Report
) -> Iterator[tuple[int, dict]]:
    """Without those whose text has to be had elsewhere."""
    masked = kept = 0
    for line, record in rows:
        if any(MASKED in str(turn) for turn in record.get("turns") or ()):
            masked += 1
            continue
        kept += 1
        yield line, record
    if masked and not kept:
        raise UserError(
            f"{path}: every row is a placeholder; fill them in with SPEED-Bench's own prepare_data.py"
        )
    if masked:
        report(
            f"{path}: {masked} placeholder rows skipped; SPEED-Bench's own prepare_data.py fills them in"
        )


def task_of(record: dict[str, Any], line: int) -> Task:
    name = record.get("id", record.get("question_id", line))
    category = record.get("category")
    kept = {
        "id": str(name),
        "category": None if category is None else str(category),
        "extra": {name: record[name] for name in EXTRA if name in record},
    }
    if "turns" in record or "messages" not in record:
        return Task(turns=tuple(require_turns(record, f"task {name}")), **kept)  # type: ignore[arg-type]
    said: dict[str, list[Any]] = {"system": [], "user": [], "assistant": []}
    for message in record["messages"] if isinstance(record["messages"], list) else []:
        if not isinstance(message, dict) or message.get("role") not in said:
            raise ValueError(
                f"task {name}: a message needs a role (system, user or assistant) and its content"
            )
        said[message["role"]].append(message.get("content"))
    turns = require_turns({"turns": said["user"]}, f"task {name}")
    if len(said["system"]) > 1 or not all(isinstance(text, str) for text in said["system"]):
        raise ValueError(f"task {name}: at most one system message, a text")
    return Task(turns=tuple(turns), system=next(iter(said["system"]), None), **kept)  # type: ignore[arg-type]

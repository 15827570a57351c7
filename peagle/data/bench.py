"""Benchmark sets: tasks of one or more user turns, in DIR/NAME.jsonl or in any JSONL file.

A record holds `turns` (the user's, in order), one `prompt`, or `messages` in the chat layout; there, answers that are
written down are passed over: the target gives its own.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.data.records import MAX_BROKEN, Report, ignore, read_records, require_turns
from peagle.errors import UserError, nearest
from peagle.home import home

SETS = ("humaneval", "mt_bench", "gsm8k", "mbpp", "spec_bench", "speed_bench")
ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None


def read_sets(
    words: list[str], data: Path | None = None, limit: int | None = None, report: Report = ignore
) -> dict[str, list[Task]]:
    """The tasks of every set, by its name; of a path, the file's. All is found before anything is read."""
    if limit is not None and limit < 1:
        raise UserError(f"the limit is {limit}: use --limit 1 or more, or none for the whole set")
    found: dict[str, Path] = {}
    for word in words:
        path = find_set(word, data)
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        if name in found:
            raise UserError(f"set {name!r} is given twice ({found[name]} and {path}): name each once")
        found[name] = path
    if not found:
        raise UserError(f"no set is given: use --set with one or more of {', '.join(SETS)}, or a JSONL file")
    return {name: read_tasks(path, limit, report) for name, path in found.items()}


def find_set(word: str, data: Path | None = None) -> Path:
    """The file of a set: a known name in the data folder, or a path."""
    given = Path(word).expanduser()
    if word not in SETS:
        if given.is_file():
            return given
        if given.name.endswith(ENDINGS) or len(given.parts) > 1:
            raise UserError(f"no file {given}: give a JSONL file with `turns`, or one of {', '.join(SETS)}")
    folder = data_folder(data)
    if word not in SETS:
        raise UserError(
            f"unknown set {word!r}: use one of {', '.join(SETS)} (looked for in {folder}),"
            f" or the path of a JSONL file with `turns`.{nearest(word, list(SETS))}"
        )
    for ending in ENDINGS:
        if (path := folder / f"{word}{ending}").is_file():
            return path
    raise UserError(
        f"no {word}.jsonl or {word}.jsonl.gz in {folder}: put it there, or name its folder with --data or PEAGLE_DATA"
    )


def data_folder(given: Path | None = None) -> Path:
    """`given`, else `PEAGLE_DATA`, else `data` in the cache folder."""
    if given is not None:
        return Path(given).expanduser()
    chosen = os.environ.get("PEAGLE_DATA")
    return Path(chosen).expanduser() if chosen else home() / "data"


def read_tasks(path: Path, limit: int | None = None, report: Report = ignore) -> list[Task]:
    """The first `limit` tasks of a file, or all. Records without turns are reported and skipped, up to a point."""
    tasks: list[Task] = []
    broken = 0
    for line, record in read_records(path, report):
        try:
            tasks.append(task_of(record, line))
        except ValueError as error:
            broken += 1
            report(f"{path}:{line}: skipped, {error}")
            if broken > MAX_BROKEN:
                raise UserError(f"{path}: more than {MAX_BROKEN} records without turns, the last in {line}") from error
        if len(tasks) == limit:
            break
    if not tasks:
        raise UserError(f"{path} holds no task: a record needs `turns`, a list of the user's texts")
    return tasks


def task_of(record: dict[str, Any], line: int) -> Task:
    name = record.get("id", record.get("question_id", line))
    category = record.get("category")
    kept = {"id": str(name), "category": None if category is None else str(category)}
    if "turns" in record or "messages" not in record:
        return Task(turns=tuple(require_turns(record, f"task {name}")), **kept)  # type: ignore[arg-type]
    said: dict[str, list[Any]] = {"system": [], "user": [], "assistant": []}
    for message in record["messages"] if isinstance(record["messages"], list) else []:
        if not isinstance(message, dict) or message.get("role") not in said:
            raise ValueError(f"task {name}: a message needs a role (system, user or assistant) and its content")
        said[message["role"]].append(message.get("content"))
    turns = require_turns({"turns": said["user"]}, f"task {name}")
    if len(said["system"]) > 1 or not all(isinstance(text, str) for text in said["system"]):
        raise ValueError(f"task {name}: at most one system message, a text")
    return Task(turns=tuple(turns), system=next(iter(said["system"]), None), **kept)  # type: ignore[arg-type]

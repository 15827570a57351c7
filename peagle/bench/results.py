"""The file of a run, DIR/NAME.json: written beside and renamed after every run of a cell, so that nothing is lost.

Runs of cells that are not finished lie in `runs`; a finished cell keeps its medians only. The answers of each cell's
first run lie beside it, in NAME.answers.jsonl: what is checked and scored.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peagle.bench import FORMAT
from peagle.bench.load.jobs import RequestRecord
from peagle.bench.order import CHAINS, keys_of
from peagle.errors import UserError
from peagle.paths import write_json
from peagle.results.cell import EXACT, CellKey, CellRun, cell_of

SAME = (
    "format",
    "pair",
    "target",
    "engine",
    "endpoint",
    "drafters",
    "settings",
    "tasks",
)  # or it is another run
MACHINE = ("cpu", "gpu", "threads", "driver", "torch", "transformers", "peagle", "commit")


class Results:
    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        """`head`: what identifies the run. Continues what lies at `path`, if it is the same run."""
        self.path, self.repeats = path, int(head["settings"]["repeats"])
        found = read(path) if path.exists() else None
        if found is not None:
            require_same(path, found, head)
        created = {"name": path.stem, "created": now()}
        self.content: dict[str, Any] = {
            **head,
            **created,
            "cells": [],
            "scores": [],
            "runs": [],
        } | (found or {})
        self.resumed = found is not None
        self._read = path.read_bytes() if path.exists() else b""
        if not self.resumed:
            self.answers_path.unlink(missing_ok=True)  # of another run
        self._forget_failed()

    def require_current(self) -> None:
        """Nobody has written the file since it was read; for whoever holds the lock."""
        if (self.path.read_bytes() if self.path.exists() else b"") != self._read:
            raise UserError(
                f"{self.path} was written meanwhile by another peagle bench: run the command again"
            )

    @property
    def cells(self) -> list[dict[str, Any]]:
        return self.content["cells"]

    def cell(self, key: CellKey) -> dict[str, Any] | None:
        return next((cell for cell in self.cells if key_of(cell) == key), None)

    def done(self, key: CellKey) -> int:
        """How many runs of the cell are there."""
        cell = self.cell(key)
        return cell["repeats"] if cell else 0

    def add(self, key: CellKey, run: CellRun) -> dict[str, Any]:
        """One more run of a cell; the file is written."""
        runs = [one for one in self.content["runs"] if key_of(one) == key]
        others = [one for one in self.content["runs"] if key_of(one) != key]
        runs.append(asdict(key) | run.as_dict())
        cell = cell_of(
            key, [{name: one[name] for name in one if name not in EXACT} for one in runs]
        )
        self.content["cells"] = [one for one in self.cells if key_of(one) != key] + [cell]
        self.content["runs"] = others + (runs if len(runs) < self.repeats else [])
        if len(runs) == 1:
            self._keep_answers(key, run.records)
        self.write()
        return cell

    def write(self) -> None:
        write_json(self.path, self.content)

    def settle(self, keys: list[CellKey]) -> None:
        """The cells in the order they were asked for."""
        self.content["cells"] = sorted(self.cells, key=lambda cell: keys.index(key_of(cell)))
        self.write()

    # --- answers ------------------------------------------------------------------------------------------------------

    @property
    def answers_path(self) -> Path:
        return self.path.with_suffix(".answers.jsonl")

    def answers(self) -> dict[CellKey, list[RequestRecord]]:
        """Of every cell's first run; the last line of a cell counts, a line cut short by a kill does not."""
        found: dict[CellKey, list[RequestRecord]] = {}
        if not self.answers_path.exists():
            return found
        for line in self.answers_path.read_text().splitlines():
            try:
                told = json.loads(line)
                records = [
                    RequestRecord(task, turn, 0.0, ids=ids, text=text)
                    for task, turn, ids, text in told["answers"]
                ]
                found[key_of(told)] = records
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def _keep_answers(self, key: CellKey, records: list[RequestRecord]) -> None:
        told = [[r.task, r.turn, r.ids, r.text] for r in records if r.error is None]
        with self.answers_path.open("a") as file:
            file.write(json.dumps(asdict(key) | {"answers": told}) + "\n")

    def _forget_failed(self) -> None:
        """What failed altogether is measured again."""
        lost = [
            key_of(cell)
            for cell in self.cells
            if cell["failed"] and not any(cell["output_throughput_runs"])
        ]
        for name in ("cells", "runs"):
            self.content[name] = [one for one in self.content[name] if key_of(one) not in lost]


def key_of(cell: Mapping[str, Any]) -> CellKey:
    """Files written before there were trees do not name them."""
    return CellKey(**{name: cell[name] for name in EXACT if name in cell or name != "tree"})


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(
            f"{path} is no JSON ({error}): move it away, or use another --name"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{path} is no result of peagle bench: use another --name or --out")
    return found


def require_same(path: Path, found: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """One file, one set of settings, one machine."""
    for name in SAME:
        if found.get(name) != head.get(name):
            raise UserError(
                f"{path} holds another run, {difference(name, found.get(name), head.get(name))}: {fix(path)}"
            )
    for name in MACHINE:
        was, is_ = found["environment"].get(name), head["environment"].get(name)
        if was != is_:
            raise UserError(
                f"{path} was begun on another machine ({name} {was}, here {is_}): {fix(path)}"
            )


def difference(name: str, was: Any, is_: Any) -> str:
    if isinstance(was, dict) and isinstance(is_, dict):
        names = [key for key in {**was, **is_} if was.get(key) != is_.get(key)]
        return f"{name} {names[0]} {was.get(names[0])!r} instead of {is_.get(names[0])!r}"
    return f"{name} {was!r} instead of {is_!r}"


def fix(path: Path) -> str:
    return f"use --name {path.stem}-2 (or another --out), or the settings it was begun with"


def path_of(folder: Path, name: str | None, pair: str, head: Mapping[str, Any]) -> Path:
    """The file of that name; without one, an unfinished run of the same settings, else one named by pair and day."""
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give --out a folder")
    if name is not None:
        if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
            raise UserError(
                f"--name {name!r} must be a file's name of letters, digits, . + - _ (without .json)"
            )
        return folder / f"{name.removesuffix('.json')}.json"
    for path in sorted(folder.glob("*.json")) if folder.exists() else []:
        if unfinished(path, head):
            return path
    slug = re.sub(r"[^\w.+-]+", "-", Path(pair).name).strip("-.") or "run"
    return folder / f"{slug}-{datetime.now():%Y-%m-%d}.json"


def unfinished(path: Path, head: Mapping[str, Any]) -> bool:
    try:
        found = read(path)
        require_same(path, found, head)
    except (UserError, KeyError, OSError):
        return False
    how = found["settings"]
    wanted = keys_of(
        how["sets"], how["methods"], how["k"], how["concurrency"], how.get("tree", CHAINS)
    )
    return len(found["cells"]) < len(wanted) or any(
        cell["repeats"] < how["repeats"] for cell in found["cells"]
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

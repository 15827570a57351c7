"""Which file a run is written to, and whether it may resume the run that the file holds."""

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.results.key import CHAINS_ONLY, cell_keys
from peagle.results.run_file import BenchResult, parse_result
from peagle.results.run_info import RunInfo

RUN_FIELDS = ("pair", "target", "engine", "endpoint", "drafters", "settings", "tasks")
MACHINE_FIELDS = ("cpu", "gpu", "threads", "driver", "torch", "transformers", "peagle", "commit")


def read_resumable(path: Path, info: RunInfo) -> BenchResult:
    """The result at `path`, if it is of the same run on the same machine."""
    previous = parse_result(path, "move it away, or use another `name` or `out_folder`")
    fix = f"use `name` {path.stem}-2 (or another `out_folder`), or the settings it was started with"
    for name in RUN_FIELDS:
        before = getattr(previous.info, name)
        after = getattr(info, name)
        if before != after:
            raise UserError(
                f"{path} holds another run, {describe_difference(name, before, after)}: {fix}"
            )
    for name in MACHINE_FIELDS:
        before = previous.info.environment.get(name)
        after = info.environment.get(name)
        if before != after:
            raise UserError(
                f"{path} was started on another machine ({name} {before}, here {after}): {fix}"
            )
    return previous


def describe_difference(name: str, before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
        return f"{name} {key} {before.get(key)!r} instead of {after.get(key)!r}"
    return f"{name} {before!r} instead of {after!r}"


def result_path(folder: Path, name: str | None, info: RunInfo) -> Path:
    """The file called `name`.

    Without a name, an unfinished run of the same settings, else a file named by pair and day.
    """
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give `out_folder` a folder")
    if name is not None:
        if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
            raise UserError(
                f"`name` {name!r} must be a file name of letters, digits, . + - _ (without .json)"
            )
        return folder / f"{name.removesuffix('.json')}.json"
    for path in sorted(folder.glob("*.json")) if folder.exists() else []:
        if is_unfinished(path, info):
            return path
    slug = re.sub(r"[^\w.+-]+", "-", Path(info.pair_name).name).strip("-.") or "run"
    return folder / f"{slug}-{datetime.now():%Y-%m-%d}.json"


def is_unfinished(path: Path, info: RunInfo) -> bool:
    """Whether the file holds the same run with cells or repeats missing."""
    try:
        previous = read_resumable(path, info)
    except UserError:
        return False
    settings = info.settings
    keys = cell_keys(
        settings["sets"],
        settings["methods"],
        settings["k"],
        settings["concurrency"],
        settings.get("tree", CHAINS_ONLY),
    )
    return len(previous.cells) < len(keys) or any(
        (cell.repeats or 0) < settings["repeats"] for cell in previous.cells
    )

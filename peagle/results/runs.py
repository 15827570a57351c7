"""Result files of `peagle bench`, read: what is foreign is skipped by name, different targets are refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from peagle.bench import FORMAT
from peagle.errors import UserError

IDENTITY = (
    "name",
    "dtype",
    "revision",
    "sha",
)  # of a target; what is not known contradicts nothing


def number(value: Any) -> float | None:
    """A finite number, or None: files hold nulls, and Python's JSON reads NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return found if isfinite(found) else None


def clean(value: Any) -> Any:
    """Text that can be printed: half a surrogate pair, which JSON can hold, becomes a question mark."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    return value


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class ResultCell:
    """One method at one K, set and concurrency. `raw` holds every field under vLLM's name.

    Trees of a size are a method of their own: "p-eagle tree 32".
    """

    set: str
    method: str
    k: int | str  # 0 for none; "auto"
    concurrency: int
    raw: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str, int | str, int]:
        return self.set, self.method, self.k, self.concurrency

    def number(self, name: str) -> float | None:
        return number(self.raw.get(name))

    def count(self, name: str) -> int:
        return int(self.number(name) or 0)

    @property
    def throughput(self) -> float | None:
        """Output tokens a second; None where nothing came out."""
        found = self.number("output_throughput")
        return found if found and found > 0 else None

    def spread(self, name: str = "output_throughput") -> tuple[float, float] | None:
        """The lowest and highest of several runs; None where there was one, or nobody wrote it down."""
        runs = [number(value) for value in sequence(self.raw.get(f"{name}_runs"))]
        ends = [number(value) for value in sequence(self.raw.get(f"{name}_spread"))]
        if len(runs) == 1 or self.number("repeats") == 1:
            return None
        known = [value for value in (ends if len(ends) == 2 else runs) if value is not None]
        return (min(known), max(known)) if len(known) > 1 else None

    def interval(self, name: str = "output_throughput") -> tuple[float, float]:
        """The spread, or the value itself where none is known."""
        middle = self.number(name) or 0.0
        return self.spread(name) or (middle, middle)


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def parse_cell(raw: Any) -> ResultCell | None:
    """None if it does not say what it measured."""
    raw = mapping(raw)
    names = raw.get("set"), raw.get("method")
    k, concurrency, tree = raw.get("k"), raw.get("concurrency"), raw.get("tree", 0)
    if not all(isinstance(name, str) and name for name in names) or "output_throughput" not in raw:
        return None
    k = 0 if names[1] == "none" else k
    if isinstance(k, bool) or not (k == "auto" or (isinstance(k, int) and k >= 0)):
        return None
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        return None
    if isinstance(tree, bool) or not isinstance(tree, int) or tree < 0:
        return None
    return ResultCell(str(names[0]), with_tree(str(names[1]), tree), k, concurrency, raw)


def with_tree(method: str, tree: int) -> str:
    return f"{method} tree {tree}" if tree else method


@dataclass(frozen=True)
class ResultRun:
    """One result file."""

    path: Path
    raw: Mapping[str, Any]
    cells: tuple[ResultCell, ...]

    @property
    def name(self) -> str:
        return str(self.raw.get("name") or self.path.stem)

    @property
    def target(self) -> dict[str, Any]:
        return mapping(self.raw.get("target"))

    @property
    def pair(self) -> str:
        return str(self.raw.get("pair") or self.target.get("name") or "unknown target")

    def section(self, name: str) -> dict[str, Any]:
        return mapping(self.raw.get(name))


def read_run(path: Path) -> ResultRun:
    """A file that is no result, or holds nothing, is the user's mistake."""
    try:
        raw = clean(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        reason = (
            str(error).splitlines()[0]
            if isinstance(error, ValueError | OSError)
            else "nested too deep"
        )
        raise UserError(
            f"{path.name} cannot be read as JSON ({reason}): give a file that `peagle bench` wrote"
        ) from error
    kind = mapping(raw).get("format")
    if kind != FORMAT:
        if isinstance(kind, str) and kind.startswith("peagle-bench/"):
            raise UserError(
                f"{path.name} has format {kind!r}, this version reads {FORMAT}: update peagle"
            )
        raise UserError(f"{path.name} is no result of `peagle bench`: its format is not {FORMAT}")
    found = [parse_cell(cell) for cell in sequence(raw.get("cells"))]
    cells = tuple(cell for cell in found if cell is not None)
    if not cells:
        raise UserError(
            f"{path.name} holds no measured cell: run `peagle bench` again with the same --out to go on"
        )
    return ResultRun(path, raw, cells)


def read_runs(folder: Path, warn: Callable[[str], None]) -> list[ResultRun]:
    """Every result in a folder, or one file. What is not a result is named and skipped."""
    if not folder.exists():
        raise UserError(
            f"{folder} does not exist: give the folder that `peagle bench --out` wrote to"
        )
    runs = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else [folder]:
        try:
            runs.append(read_run(path))
        except UserError as error:
            if not folder.is_dir():
                raise
            warn(f"skipped: {error}")
    if not runs:
        raise UserError(
            f"no result of `peagle bench` in {folder}: run `peagle bench PAIR --out {folder}` first"
        )
    refuse_mixed(runs)
    return runs


def difference(runs: list[ResultRun]) -> tuple[str, dict[str, str]] | None:
    """The first thing in which the targets differ, and which file says what."""
    for field in IDENTITY:
        said = {
            run.path.name: str(run.target[field])
            for run in runs
            if run.target.get(field) is not None
        }
        if len(set(said.values())) > 1:
            return field, said
    return None


def refuse_mixed(runs: list[ResultRun]) -> None:
    if found := difference(runs):
        field, said = found
        told = ", ".join(f"{file}: {value}" for file, value in said.items())
        raise UserError(
            f"results of different targets cannot share a report ({field} differs: {told}):"
            " put each target's files in a folder of its own"
        )

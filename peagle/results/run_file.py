"""BenchResult: the whole result file of one run of `peagle bench`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.results.cell import BenchCell
from peagle.results.json_values import as_list, as_object, as_text, printable
from peagle.results.key import CellKey
from peagle.results.metrics import RunMetrics
from peagle.results.quality import Score
from peagle.results.run_info import RunInfo

FORMAT = "peagle-bench/1"


@dataclass(frozen=True, slots=True)
class PartialRun:
    """One run of a cell that does not have all its repeats yet."""

    key: CellKey
    metrics: RunMetrics

    @classmethod
    def from_json(cls, value: Any) -> "PartialRun | None":
        raw = as_object(value)
        key = CellKey.from_json(raw)
        return None if key is None else cls(key, RunMetrics.from_json(raw))

    def to_json(self) -> dict[str, Any]:
        return self.key.to_json() | self.metrics.to_json()


@dataclass(frozen=True, slots=True)
class BenchResult:
    path: Path
    info: RunInfo
    name: str
    created: str | None
    cells: tuple[BenchCell, ...]
    scores: tuple[Score, ...] = ()
    runs: tuple[PartialRun, ...] = ()

    @classmethod
    def from_json(cls, path: Path, raw: Mapping[str, Any]) -> "BenchResult":
        """Cells, scores and runs that do not say what they measured are skipped."""
        cells = (BenchCell.from_json(item) for item in as_list(raw.get("cells")))
        scores = (Score.from_json(item) for item in as_list(raw.get("scores")))
        runs = (PartialRun.from_json(item) for item in as_list(raw.get("runs")))
        return cls(
            path,
            RunInfo.from_json(raw),
            str(raw.get("name") or path.stem),
            as_text(raw.get("created")),
            tuple(cell for cell in cells if cell is not None),
            tuple(score for score in scores if score is not None),
            tuple(run for run in runs if run is not None),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.info.to_json(),
            "name": self.name,
            "created": self.created,
            "cells": [cell.to_json() for cell in self.cells],
            "scores": [score.to_json() for score in self.scores],
            "runs": [run.to_json() for run in self.runs],
        }


def read_result(path: Path) -> BenchResult:
    """A result file with at least one measured cell."""
    result = parse_result(path, "give a file that `peagle bench` wrote")
    if not result.cells:
        raise UserError(
            f"{path.name} holds no measured cell: run the same `peagle bench` command again"
        )
    return result


def parse_result(path: Path, fix: str) -> BenchResult:
    """A result file, with or without cells. `fix` ends the error for a file that is none."""
    try:
        raw = printable(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}: {fix}") from error
    except RecursionError as error:
        raise UserError(f"{path.name} is not JSON (nested too deeply): {fix}") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path.name} is not JSON ({reason}): {fix}") from error
    version = as_object(raw).get("format")
    if version == FORMAT:
        return BenchResult.from_json(path, raw)
    if isinstance(version, str) and version.startswith("peagle-bench/"):
        raise UserError(
            f"{path.name} has format {version!r}, but this version reads {FORMAT}: update peagle"
        )
    raise UserError(
        f"{path.name} is not a result of `peagle bench` (its format is not {FORMAT}): {fix}"
    )

"""ResultWriter: writes a run to DIR/NAME.json after every run of a cell, so that nothing is lost.

The runs of unfinished cells are kept in `runs`; a finished cell keeps only its medians.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from peagle.errors import UserError
from peagle.paths import write_json
from peagle.results.answers import AnswerFile, Answers
from peagle.results.cell import BenchCell
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey
from peagle.results.quality import OutputCheck, Score
from peagle.results.resume import read_resumable
from peagle.results.run_file import BenchResult, PartialRun
from peagle.results.run_info import RunInfo


class ResultWriter:
    def __init__(self, path: Path, info: RunInfo) -> None:
        """Resume the run at `path` if there is one; refuse another run."""
        self.path = path
        self.repeats = int(info.settings["repeats"])
        self._answers = AnswerFile(path)
        self.resumed = path.exists()
        if self.resumed:
            self.result = without_failed_cells(read_resumable(path, info))
        else:
            self._answers.delete()  # left over from a result file that was removed
            self.result = BenchResult(path, info, path.stem, utc_now(), ())
        self._bytes_read = self._read_bytes()

    def require_unchanged(self) -> None:
        """Refuse to go on if another process has written the file since it was read."""
        if self._read_bytes() != self._bytes_read:
            raise UserError(
                f"{self.path} was written meanwhile by another peagle bench: run the command again"
            )

    def _read_bytes(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    @property
    def cells(self) -> tuple[BenchCell, ...]:
        return self.result.cells

    def finished_runs(self, key: CellKey) -> int:
        return next((cell.repeats or 0 for cell in self.cells if cell.key == key), 0)

    def add(self, key: CellKey, run: CellRun) -> BenchCell:
        """Add one run of a cell and write the file."""
        runs = [partial for partial in self.result.runs if partial.key == key]
        other_runs = [partial for partial in self.result.runs if partial.key != key]
        runs.append(PartialRun(key, run.metrics()))
        cell = BenchCell.from_runs(key, [partial.metrics for partial in runs])
        other_cells = [other for other in self.cells if other.key != key]
        self.result = replace(
            self.result,
            cells=(*other_cells, cell),
            runs=(*other_runs, *(runs if len(runs) < self.repeats else ())),
        )
        if len(runs) == 1:
            self._answers.append(key, run.records)
        self.write()
        return cell

    def sort_cells(self, keys: Sequence[CellKey]) -> None:
        """Bring the cells into the order of `keys` and write the file."""
        cells = sorted(self.cells, key=lambda cell: keys.index(cell.key))
        self.result = replace(self.result, cells=tuple(cells))
        self.write()

    def set_check(self, key: CellKey, check: OutputCheck) -> None:
        cells = (replace(cell, check=check) if cell.key == key else cell for cell in self.cells)
        self.result = replace(self.result, cells=tuple(cells))

    def set_scores(self, scores: Sequence[Score]) -> None:
        self.result = replace(self.result, scores=tuple(scores))

    def answers(self) -> Answers:
        """The answers of every cell's first run."""
        return self._answers.read()

    def write(self) -> None:
        write_json(self.path, self.result.to_json())


def without_failed_cells(result: BenchResult) -> BenchResult:
    """Without the cells in which every request failed: they are measured again."""
    failed = {cell.key for cell in result.cells if cell.all_failed}
    return replace(
        result,
        cells=tuple(cell for cell in result.cells if cell.key not in failed),
        runs=tuple(run for run in result.runs if run.key not in failed),
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""The result files of a folder. Other files are skipped, different targets are refused."""

from collections.abc import Callable, Sequence
from pathlib import Path

from peagle.errors import UserError
from peagle.results.run_file import BenchResult, read_result

TARGET_FIELDS = ("name", "dtype", "weights", "revision", "sha")


def read_results(folder: Path, warn: Callable[[str], None]) -> list[BenchResult]:
    """Every result in a folder, or one file. `warn` receives a line for each skipped file."""
    if not folder.exists():
        raise UserError(f"{folder} does not exist: give the folder that `peagle bench` wrote to")
    if not folder.is_dir():
        return [read_result(folder)]
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            results.append(read_result(path))
        except UserError as error:
            warn(f"skipped: {error}")
    if not results:
        raise UserError(
            f"no result of `peagle bench` in {folder}: run it with this output folder first"
        )
    refuse_different_targets(results)
    return results


def target_difference(results: Sequence[BenchResult]) -> tuple[str, dict[str, str]] | None:
    """The first field in which the targets differ, and its value in each file.

    A value that a file does not have differs from nothing.
    """
    for field in TARGET_FIELDS:
        values = {
            result.path.name: str(result.info.target[field])
            for result in results
            if result.info.target.get(field) is not None
        }
        if len(set(values.values())) > 1:
            return field, values
    return None


def refuse_different_targets(results: Sequence[BenchResult]) -> None:
    difference = target_difference(results)
    if difference is None:
        return
    field, values = difference
    listed = ", ".join(f"{file}: {value}" for file, value in values.items())
    raise UserError(
        f"results of different targets cannot share a report ({field} differs: {listed}):"
        " put each target's files in a folder of its own"
    )

"""Result files keep their keys, order and numbers when they are read and written."""

import json
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.results.cell import BenchCell
from peagle.results.cell_run import CellRun
from peagle.results.json_values import as_counts, as_float, as_floats, as_int
from peagle.results.key import CellKey
from peagle.results.request_record import RequestRecord
from peagle.results.run_file import BenchResult, read_result
from peagle.results.run_info import RunInfo
from peagle.results.spec_counters import SpecCounters
from peagle.results.writer import ResultWriter

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SHIPPED = ("h200/h200.json", "h200-trees/trees.json", "h200-load/load.json", "cpu/cpu.json")
TOP_KEYS = [
    "format",
    "command",
    "pair",
    "target",
    "engine",
    "endpoint",
    "drafters",
    "environment",
    "settings",
    "tasks",
    "name",
    "created",
    "cells",
    "scores",
    "runs",
]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_is_unchanged_after_reading_and_writing(name: str) -> None:
    text = (RESULTS / name).read_text()
    result = read_result(RESULTS / name)
    assert json.dumps(result.to_json(), indent=2) + "\n" == text


def test_an_unfinished_run_is_unchanged_after_reading_and_writing(tmp_path: Path) -> None:
    run = CellRun(
        [RequestRecord("a", 0, 10.0, [10.5, 10.7, 11.1], tokens=5)],
        duration=1.2345678901,
        spec=SpecCounters(4, 20, 8, [4, 4], [4, 2]),
        k_steps={11: 3, 5: 4},
        gpu_memory_bytes=12345,
        energy_joules=12.0,
        exact_mode="batched",
    )
    writer = ResultWriter(tmp_path / "r.json", RunInfo(settings={"repeats": 3}))
    writer.add(CellKey("x", "p-eagle", "auto", 2, 16), run)
    text = (tmp_path / "r.json").read_text()
    content = json.loads(text)
    assert list(content) == TOP_KEYS
    assert list(content["runs"][0])[:8] == [
        "set",
        "method",
        "k",
        "concurrency",
        "tree",
        "requests",
        "failed",
        "first_error",
    ]
    assert content["runs"][0]["duration"] == 1.2345678901
    assert content["cells"][0]["duration"] == 1.23457  # medians are rounded to six digits
    assert content["runs"][0]["k_steps"] == {"5": 4, "11": 3}
    assert content["runs"][0]["exact_mode"] == content["cells"][0]["exact_mode"] == "batched"
    result = BenchResult.from_json(tmp_path / "r.json", content)
    assert json.dumps(result.to_json(), indent=2) + "\n" == text


def test_a_missing_or_invalid_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "nope.json"
    with pytest.raises(UserError, match=f"^there is no file {path}: give a file that `peagle ben"):
        read_result(path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"^nope\.json is not JSON \("):
        read_result(path)


def test_invalid_values_are_read_as_unknown() -> None:
    assert as_float(True) is as_float("3") is as_float(float("nan")) is None
    assert (as_float(3), as_int(3.0), as_int("3")) == (3.0, 3, None)
    assert as_floats([1, 2.5]) == (1.0, 2.5) and as_floats([1, None]) is as_floats("12") is None
    assert as_counts({"7": 2, "x": 3, "8": "?"}) == {7: 2} and as_counts(None) == {}
    raw = {"set": "s", "method": "none", "concurrency": 1, "output_throughput": "fast"}
    cell = BenchCell.from_json(raw)
    assert cell is not None and cell.throughput is None and cell.spread is None
    assert cell.k == 0 and cell.k_steps == {} and cell.check is None

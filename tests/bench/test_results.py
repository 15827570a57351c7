"""The result file: each run is added to it, a stopped run resumes, a different run is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import UserError
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey
from peagle.results.request_record import RequestRecord
from peagle.results.resume import result_path
from peagle.results.run_file import FORMAT
from peagle.results.run_info import RunInfo
from peagle.results.writer import ResultWriter

KEY = CellKey("x", "none", 0, 1)
ENVIRONMENT = {"cpu": "c", "gpu": None, "threads": 1, "torch": "2"}
SETTINGS = {"repeats": 2, "sets": ["x"], "methods": ["none"], "k": [3], "concurrency": [1]}
INFO = RunInfo(
    command="peagle bench",
    pair="tiny",
    target={"name": "t"},
    engine="native",
    environment=ENVIRONMENT,
    settings=SETTINGS,
    tasks={"x": "1 abc"},
)


def make_run(tokens: int = 4, error: str | None = None) -> CellRun:
    record = RequestRecord(
        "a", 0, 0.0, [1.0], tokens=tokens, ids=[5] * tokens, text="w5", error=error
    )
    return CellRun([record], 1.0)


def read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert content["format"] == FORMAT
    return content


def test_runs_become_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    ResultWriter(path, INFO).add(KEY, make_run(4))
    content = read_json(path)
    assert (content["cells"][0]["repeats"], len(content["runs"]), content["name"]) == (1, 1, "r")
    again = ResultWriter(path, INFO)
    assert again.resumed and again.finished_runs(KEY) == 1
    again.add(KEY, make_run(8))
    content = read_json(path)
    assert content["cells"][0]["output_throughput_runs"] == [4, 8]
    assert content["runs"] == []  # A finished cell needs no runs.
    assert content["created"]
    assert ResultWriter(path, INFO).finished_runs(KEY) == 2


def test_answers_of_the_first_run_are_read(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "r.json", INFO)
    writer.add(KEY, make_run(4))
    writer.add(KEY, make_run(8))
    with (tmp_path / "r.answers.jsonl").open("a") as file:
        file.write('{"set": "x", "method": "no')  # killed while writing
    [(key, [record])] = writer.answers().items()
    assert (key, record.ids, record.text) == (KEY, [5] * 4, "w5")


def test_failed_cells_are_measured_again(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "r.json", INFO)
    writer.add(KEY, make_run(0, error="down"))
    assert writer.finished_runs(KEY) == 1
    assert ResultWriter(tmp_path / "r.json", INFO).finished_runs(KEY) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": SETTINGS | {"repeats": 3}}, "settings repeats 2 instead of 3"),
        ({"target": {"name": "other"}}, "target name 't' instead of 'other'"),
        ({"engine": "endpoint"}, "engine 'native' instead of 'endpoint'"),
        ({"tasks": {"x": "1 def"}}, "tasks x"),
        ({"environment": ENVIRONMENT | {"gpu": "H200"}}, "another machine"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    ResultWriter(tmp_path / "r.json", INFO).add(KEY, make_run())
    with pytest.raises(UserError, match=message) as error:
        ResultWriter(tmp_path / "r.json", replace(INFO, **change))
    assert "`name` r-2" in str(error.value)


def test_files_that_are_not_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(UserError, match=r"not JSON.*another `name`"):
        ResultWriter(tmp_path / "r.json", INFO)
    (tmp_path / "r.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match=r"not a result of `peagle bench`.*another `name`"):
        ResultWriter(tmp_path / "r.json", INFO)


def test_names_of_result_files(tmp_path: Path) -> None:
    assert result_path(tmp_path, "mine", INFO) == tmp_path / "mine.json"
    assert result_path(tmp_path, None, replace(INFO, pair="a/b c")).name.startswith("b-c-20")
    for bad in ("../x", "a/b", ".x", ""):
        with pytest.raises(UserError, match="must be a file name"):
            result_path(tmp_path, bad, INFO)
    ResultWriter(tmp_path / "yesterday.json", INFO).add(KEY, make_run())
    assert result_path(tmp_path, None, INFO).name == "yesterday.json"  # unfinished: it resumes
    ResultWriter(tmp_path / "yesterday.json", INFO).add(KEY, make_run())
    assert result_path(tmp_path, None, INFO).name.startswith("tiny-20")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="give `out_folder` a folder"):
        result_path(tmp_path / "file", None, INFO)


def test_files_without_trees_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    ResultWriter(path, INFO).add(KEY, make_run(4))
    content = read_json(path)
    for section in ("cells", "runs"):
        for item in content[section]:
            del item["tree"]
    path.write_text(json.dumps(content))
    again = ResultWriter(path, INFO)
    assert again.finished_runs(KEY) == 1
    assert again.finished_runs(CellKey("x", "none", 0, 1, 16)) == 0
    again.add(KEY, make_run(8))
    assert [(cell["repeats"], cell["tree"]) for cell in read_json(path)["cells"]] == [(2, 0)]


def test_a_run_is_unfinished_until_its_trees_are_measured(tmp_path: Path) -> None:
    settings = SETTINGS | {"methods": ["p-eagle"], "repeats": 1, "tree": [0, 16]}
    info = replace(INFO, settings=settings)
    writer = ResultWriter(tmp_path / "r.json", info)
    writer.add(CellKey("x", "p-eagle", 3, 1), make_run())
    assert result_path(tmp_path, None, info) == tmp_path / "r.json"
    writer.add(CellKey("x", "p-eagle", 3, 1, 16), make_run())
    assert result_path(tmp_path, None, info) != tmp_path / "r.json"


def test_a_file_changed_by_another_process_is_an_error(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "r.json", INFO)
    writer.require_unchanged()
    ResultWriter(tmp_path / "r.json", INFO).add(KEY, make_run())
    with pytest.raises(UserError, match="another peagle bench"):
        writer.require_unchanged()

"""The file of a run: grows run by run, goes on where it was stopped, refuses what does not belong in it."""

import json
from pathlib import Path

import pytest

from peagle.bench.load.jobs import RequestRecord
from peagle.bench.results import FORMAT, Results, path_of, read
from peagle.errors import UserError
from peagle.results.cell import CellKey, CellRun

KEY = CellKey("x", "none", 0, 1)
HEAD = {
    "format": FORMAT,
    "command": "peagle bench",
    "pair": "tiny",
    "target": {"name": "t"},
    "engine": "native",
    "endpoint": None,
    "drafters": {},
    "environment": {"cpu": "c", "gpu": None, "threads": 1, "torch": "2"},
    "settings": {"repeats": 2, "sets": ["x"], "methods": ["none"], "k": [3], "concurrency": [1]},
    "tasks": {"x": "1 abc"},
}


def one(tokens: int = 4, error: str | None = None) -> CellRun:
    return CellRun(
        [
            RequestRecord(
                "a", 0, 0.0, [1.0], tokens=tokens, ids=[5] * tokens, text="w5", error=error
            )
        ],
        1.0,
    )


def test_runs_become_a_cell(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEAD)
    results.add(KEY, one(4))
    held = read(tmp_path / "r.json")
    assert (held["cells"][0]["repeats"], len(held["runs"]), held["name"]) == (1, 1, "r")
    again = Results(tmp_path / "r.json", HEAD)
    assert again.resumed and again.done(KEY) == 1
    again.add(KEY, one(8))
    held = read(tmp_path / "r.json")
    assert held["cells"][0]["output_throughput_runs"] == [4, 8]
    assert held["runs"] == []  # a finished cell needs them no more
    assert held["created"]
    assert Results(tmp_path / "r.json", HEAD).done(KEY) == 2


def test_answers_of_the_first_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEAD)
    results.add(KEY, one(4))
    results.add(KEY, one(8))
    with results.answers_path.open("a") as file:
        file.write('{"set": "x", "method": "no')  # killed while writing
    [(key, [record])] = results.answers().items()
    assert (key, record.ids, record.text) == (KEY, [5] * 4, "w5")


def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEAD)
    results.add(KEY, one(0, error="down"))
    assert results.done(KEY) == 1
    assert Results(tmp_path / "r.json", HEAD).done(KEY) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": HEAD["settings"] | {"repeats": 3}}, "settings repeats 2 instead of 3"),
        ({"target": {"name": "other"}}, "target name 't' instead of 'other'"),
        ({"engine": "endpoint"}, "engine 'native' instead of 'endpoint'"),
        ({"tasks": {"x": "1 def"}}, "tasks x"),
        ({"environment": HEAD["environment"] | {"gpu": "H200"}}, "another machine"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    Results(tmp_path / "r.json", HEAD).add(KEY, one())
    with pytest.raises(UserError, match=words) as told:
        Results(tmp_path / "r.json", HEAD | change)
    assert "--name r-2" in str(told.value)


def test_files_that_are_no_result(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(UserError, match="no JSON"):
        Results(tmp_path / "r.json", HEAD)
    (tmp_path / "r.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="no result of peagle bench"):
        Results(tmp_path / "r.json", HEAD)


def test_names(tmp_path: Path) -> None:
    assert path_of(tmp_path, "mine", "tiny", HEAD) == tmp_path / "mine.json"
    assert path_of(tmp_path, None, "a/b c", HEAD).name.startswith("b-c-20")
    for bad in ("../x", "a/b", ".x", ""):
        with pytest.raises(UserError, match="must be a file's name"):
            path_of(tmp_path, bad, "tiny", HEAD)
    Results(tmp_path / "yesterday.json", HEAD).add(KEY, one())
    assert (
        path_of(tmp_path, None, "tiny", HEAD).name == "yesterday.json"
    )  # not finished: it goes on
    Results(tmp_path / "yesterday.json", HEAD).add(KEY, one())
    assert path_of(tmp_path, None, "tiny", HEAD).name.startswith("tiny-20")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="give --out a folder"):
        path_of(tmp_path / "file", None, "tiny", HEAD)


def test_files_from_before_there_were_trees(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", HEAD)
    results.add(KEY, one(4))
    held = read(tmp_path / "r.json")
    for part in ("cells", "runs"):
        for told in held[part]:
            del told["tree"]
    (tmp_path / "r.json").write_text(json.dumps(held))
    again = Results(tmp_path / "r.json", HEAD)
    assert again.done(KEY) == 1 and again.done(CellKey("x", "none", 0, 1, 16)) == 0
    again.add(KEY, one(8))
    assert [(cell["repeats"], cell["tree"]) for cell in read(tmp_path / "r.json")["cells"]] == [
        (2, 0)
    ]


def test_a_run_is_unfinished_until_its_trees_are_there(tmp_path: Path) -> None:
    head = HEAD | {
        "settings": HEAD["settings"] | {"methods": ["p-eagle"], "repeats": 1, "tree": [0, 16]}
    }
    results = Results(tmp_path / "r.json", head)
    results.add(CellKey("x", "p-eagle", 3, 1), one())
    assert path_of(tmp_path, None, "tiny", head) == tmp_path / "r.json"
    results.add(CellKey("x", "p-eagle", 3, 1, 16), one())
    assert path_of(tmp_path, None, "tiny", head) != tmp_path / "r.json"

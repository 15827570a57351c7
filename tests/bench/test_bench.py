"""Benchmark sets: their lookup, their tasks, and reports of invalid records."""

import gzip
import json
from pathlib import Path

import pytest

from peagle.data.bench import Task, data_folder, find_set, read_sets, read_tasks
from peagle.errors import UserError


def write(path: Path, *records: object) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_turns_prompt_and_messages(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"id": 81, "category": "writing", "turns": ["one", "two"], "prompt": "not this"},
        {"question_id": "abc", "turns": ["speed"], "sub_category": "code"},
        {"prompt": "alone"},
        {
            "id": "m",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": "written by somebody else"},
                {"role": "user", "content": "second"},
            ],
        },
    )
    assert read_tasks(path) == [
        Task("81", ("one", "two"), "writing"),
        Task("abc", ("speed",)),
        Task("3", ("alone",)),
        Task("m", ("first", "second"), None, "be brief"),
    ]


def test_sets_are_found_by_name_plain_or_gzipped(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", {"turns": ["a"]})
    with gzip.open(tmp_path / "mbpp.jsonl.gz", "wt") as file:
        file.write('{"turns": ["b"]}\n')
    mine = write(tmp_path / "mine.jsonl", {"turns": ["c"]})
    sets = read_sets(["gsm8k", "mbpp", str(mine)], tmp_path)
    assert {name: tasks[0].turns for name, tasks in sets.items()} == {
        "gsm8k": ("a",),
        "mbpp": ("b",),
        "mine": ("c",),
    }


def test_the_data_folder_follows_environment_and_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PEAGLE_DATA", raising=False)
    assert data_folder() == tmp_path / "home" / "data"
    monkeypatch.setenv("PEAGLE_DATA", str(tmp_path / "data"))
    assert data_folder() == tmp_path / "data"
    assert data_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("humanevel", "Did you mean 'humaneval'"),
        ("humanevel", "looked for in {data}"),
        ("mt_bench", "no mt_bench.jsonl or mt_bench.jsonl.gz in {data}"),
        ("some/where", "no file some/where"),
        ("mine.jsonl", "no file mine.jsonl"),
    ],
)
def test_a_missing_set_is_an_error(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        find_set(word, tmp_path)
    assert message.format(data=tmp_path) in str(error.value)


def test_a_set_given_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k.jsonl", {"turns": ["a"]})
    with pytest.raises(UserError, match="given twice"):
        read_sets(["gsm8k", str(path)], tmp_path)
    with pytest.raises(UserError, match="no set is given"):
        read_sets([], tmp_path)


BROKEN = [
    "{",
    "[1]",
    {"turns": []},
    {"turns": ["a", " "]},
    {"turns": "a"},
    {"answer": "a"},
    {"messages": "a"},
    {"messages": [{"role": "assistant", "content": "a"}]},
    {"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "system", "content": None}, {"role": "user", "content": "a"}]},
]


def test_broken_lines_are_reported_and_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *BROKEN, {"turns": ["good"]})
    lines: list[str] = []
    assert [task.turns for task in read_tasks(path, report=lines.append)] == [("good",)]
    assert [line.split(": ")[0] for line in lines] == [
        f"{path}:{i + 1}" for i in range(len(BROKEN))
    ]


def test_files_without_a_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no record"):
        read_tasks(write(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="holds no task"):
        read_tasks(write(tmp_path / "other.jsonl", {"answer": "a"}))
    with pytest.raises(UserError, match="more than 100 records without turns"):
        read_tasks(write(tmp_path / "many.jsonl", *[{"answer": "a"}] * 101, {"turns": ["a"]}))


def test_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *({"turns": [f"t{i}"]} for i in range(5)), "{")
    lines: list[str] = []
    assert [task.turns[0] for task in read_tasks(path, 2, lines.append)] == ["t0", "t1"]
    assert lines == []
    assert len(read_sets([str(path)], limit=9)["x"]) == 5
    with pytest.raises(UserError, match="`limit` is 0: use 1 or more"):
        read_sets([str(path)], limit=0)

"""docs/science.md: tables and figure are generated from the committed records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools import comparison

ROOT = Path(__file__).parents[2]


def record(name: str, seed: int, length: float, **more: Any) -> dict[str, Any]:
    shares = [round(0.8 - 0.05 * i, 4) for i in range(11)]
    cells = {
        f"K={k}": {"acceptance_length": length + k / 10, "accepted_per_position": shares[:k]}
        for k in comparison.KS
    }
    return {
        "name": name,
        "seed": seed,
        "label": name.upper(),
        "target": "tiny",
        "method": "p-eagle",
        "settings": {},
        "steps": 1200,
        "target_tokens": 19_660_800,
        "seconds": 90,
        "seconds_compiled": 48.0,
        "device": "CPU",
        "bytes": 15_800_000,
        "sets": {"humaneval": cells, "gsm8k": cells},
    } | more


def line(set_name: str, shape: str, speed: float, step: float) -> dict[str, Any]:
    speeds = {"1": speed, "8": 5 * speed}
    entry = {"set": set_name, "shape": shape, "tokens_per_second": speeds, "acceptance_length": 3.1}
    return entry | {"step_ms": step, "device": "CPU"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "ladder.toml").write_text(
        '[base]\n[[run]]\nname = "p-eagle"\n[[run]]\nname = "dependency"\n'
    )
    records = [record("p-eagle", seed, length) for seed, length in ((0, 2.0), (1, 2.2), (2, 2.4))]
    records[0]["engine"] = [
        line("humaneval", "K=7", 3000.0, 2.0),
        line("humaneval", "tree 32, K=7", 3600.0, 2.2),
    ]
    records.append(
        record("dependency", 0, 3.0, settings={"dependency": 256, "aux_layer_ids": [1, 2]})
    )
    records[-1]["engine"] = [line("humaneval", "K=7", 3300.0, 2.03)]
    with_trees(records[-1])
    write(folder, *records, ALONE | {"engine": [line("humaneval", "K=0", 1000.0, 1.0)]})
    return folder


ALONE = {"name": "none", "seed": 0, "label": "no drafts", "target": "tiny", "method": "none"}


def with_trees(one: dict[str, Any]) -> None:
    for cells in one["sets"].values():
        cells |= {
            f"tree {n}, K={k}": {"acceptance_length": 4.0 + n / 100}
            for n, k in ((15, 7), (31, 7), (31, 11))
        }


def write(folder: Path, *records: dict[str, Any]) -> None:
    for one in records:
        (folder / f"{one['name']}-{one['seed']}.json").write_text(json.dumps(one))


def page(tmp_path: Path) -> Path:
    path = tmp_path / "science.md"
    blocks = [
        f"<!-- comparison:start {name} -->\nold\n<!-- comparison:end -->\n"
        for name in comparison.TABLES
    ]
    path.write_text("# title\n" + "".join(blocks) + "the end\n")
    return path


def test_tables_and_figure(results: Path, tmp_path: Path):
    path = page(tmp_path)
    words = ["--page", str(path), "--results", str(results)]
    assert comparison.main([*words, "--check"]) == 1 and "old" in path.read_text()
    assert comparison.main(words) == 0 and comparison.main([*words, "--check"]) == 0
    text = path.read_text()
    assert text.startswith("# title\n") and text.endswith("the end\n") and "old" not in text
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in text.splitlines()
        if row.startswith("|")
    ]
    first, second = (
        next(i for i, row in enumerate(rows) if row[0] == name)
        for name in ("P-EAGLE", "DEPENDENCY")
    )
    assert (
        rows[first][1] == "2.50 (2.30–2.70)" and rows[first][5] == "+0.0%" and second == first + 1
    )
    assert rows[second][3] == "3.70" and rows[second][5] == "+27.6%"  # 3.7 compared with 2.9
    assert any(
        row[:3] == ["DEPENDENCY", "1", "`dependency=256`, `aux_layer_ids=1,2`"] for row in rows
    )
    assert ["DEPENDENCY", "humaneval", "K=7", "3,300", "16,500", "3.10", "2.03", "+1.5%"] in rows
    assert any(row[:4] == ["P-EAGLE", "humaneval", "tree 32, K=7", "3,600"] for row in rows)
    assert (
        rows[-1] == ["DEPENDENCY", "3.70", "4.15", "4.31", "4.31", "+16.5%"]
        and rows[-2][0] == "---"
    )
    assert rows[-7][:3] == ["no drafts", "humaneval", "–"], "the row without drafts is first"
    picture = (tmp_path / "comparison.svg").read_text()
    assert (
        "DEPENDENCY" in picture
        and "tokens/s" in picture
        and (tmp_path / "comparison.png").stat().st_size > 10_000
    )


def test_a_second_target_has_its_own_table(results: Path, tmp_path: Path):
    first = {
        name: comparison.table(name, comparison.read_rungs(results)) for name in comparison.TABLES
    }
    assert first.pop("second") == comparison.NOTHING
    folder = results / "other"
    folder.mkdir()
    (folder / "ladder.toml").write_text(
        '[base]\n[[run]]\nname = "p-eagle"\n[[run]]\nname = "combined"\n'
    )
    combined = record("combined", 0, 3.0, target="other", target_tokens=4_900_000)
    with_trees(combined)
    write(folder, record("p-eagle", 0, 2.0, target="other"), combined)
    rungs = comparison.read_rungs(results)
    assert {name: comparison.table(name, rungs) for name in first} == first
    header, plain, best = second_table(results)
    assert header == [
        "drafter",
        "K=3",
        "K=5",
        "K=7",
        "K=11",
        "K=7 against P-EAGLE",
        "tree 15, K=7",
        "tree 31, K=7",
        "tree 31, K=11",
        "target tokens",
        "minutes",
        "MB",
    ]
    assert plain == [
        "P-EAGLE",
        "2.30",
        "2.50",
        "2.70",
        "3.10",
        "+0.0%",
        "–",
        "–",
        "–",
        "19.7 M",
        "1.5",
        "15.8",
    ]
    assert best[:6] == ["COMBINED", "3.30", "3.50", "3.70", "4.10", "+37.0%"]
    assert best[6:] == ["4.15", "4.31", "4.31", "4.9 M", "1.5", "15.8"]

    combined["engine"] = [line("humaneval", "K=7", 900.0, 2.0), line("gsm8k", "K=7", 1.0, 2.0)]
    write(
        folder,
        combined,
        ALONE | {"target": "other", "engine": [line("humaneval", "K=0", 400.0, 1.0)]},
    )
    header, plain, best, alone = second_table(results)
    assert [row[-2:] for row in (header, plain, best)] == [
        ["c=1", "c=8"],
        ["–", "–"],
        ["900", "4,500"],
    ]
    assert alone == ["no drafts", *["–"] * 11, "400", "2,000"]
    for path in results.glob("*.json"):
        path.unlink()
    path = page(tmp_path)
    assert (
        comparison.main(["--page", str(path), "--results", str(results)]) == 0
        and "COMBINED" in path.read_text()
    )
    assert not (tmp_path / "comparison.svg").exists(), "the figure shows only the first target"


def second_table(results: Path) -> list[list[str]]:
    lines = comparison.table("second", comparison.read_rungs(results)).splitlines()
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in lines if "---" not in row
    ]


def test_mistakes_are_reported(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = page(tmp_path)
    words = ["--page", str(path), "--results", str(results)]
    path.write_text("<!-- comparison:start nowhere -->\n<!-- comparison:end -->\n")
    assert comparison.main(words) == 2
    path.write_text("<!-- comparison:start lengths -->\n")
    assert comparison.main(words) == 2
    (results / "other.json").write_text("{}")
    assert comparison.main(words) == 2 and "other.json is not a record" in capsys.readouterr().err


def test_tables_are_empty_without_records(tmp_path: Path):
    (tmp_path / "none").mkdir()
    path = page(tmp_path)
    assert comparison.main(["--page", str(path), "--results", str(tmp_path / "none")]) == 0
    assert (
        path.read_text().count(comparison.NOTHING) == len(comparison.TABLES)
        and not (tmp_path / "comparison.svg").exists()
    )


def test_the_page_is_up_to_date():
    names = re.findall(r"comparison:start (\S+)", (ROOT / "docs" / "science.md").read_text())
    assert sorted(names) == sorted(comparison.TABLES)
    assert comparison.main(["--check"]) == 0

"""`peagle report`: reading results, numbers, the verdict, the page."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.report.cells import cell_table
from peagle.report.charts import draw, inline_svg
from peagle.report.figure import Figure, Line, Point, slug, spaced
from peagle.report.figures import figures
from peagle.report.grid import OVERALL, Grid, grids_by_set, set_names
from peagle.report.machines import group_by_machine
from peagle.report.markdown import markdown
from peagle.report.page import run_facts
from peagle.report.palette import DARK, LIGHT, MARKERS, SERIES_COLORS
from peagle.report.verdict import eagle3_sentence, verdict
from peagle.results.cell import BenchCell
from peagle.results.json_values import as_float
from peagle.results.key import CellKey
from peagle.results.run_file import read_result
from peagle.results.run_folder import read_results
from tests.support.bench.results import cell, result, write

ROOT = Path(__file__).parents[2]


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if code == 0 else result.stderr


def make_cell(
    method: str, k: int | str, c: int, speed: float, spread: tuple[float, float] | None = None
) -> BenchCell:
    raw: dict[str, Any] = {
        "set": "s",
        "method": method,
        "k": k,
        "concurrency": c,
        "output_throughput": speed,
    }
    raw |= {"output_throughput_spread": list(spread)} if spread else {}
    cell = BenchCell.from_json(raw)
    assert cell is not None
    return cell


def make_precise_cell(method: str, k: int | str, c: int, speed: float) -> BenchCell:
    return make_cell(method, k, c, speed, (speed * 0.99, speed * 1.01))


# Reading results


def test_other_files_are_reported_and_skipped(tmp_path: Path) -> None:
    write(tmp_path, result())
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"cells": []}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "newer.json").write_text('{"format": "peagle-bench/2"}')
    write(tmp_path, result("empty") | {"cells": [{"set": "x"}, 3, None]})
    warnings: list[str] = []
    assert [r.name for r in read_results(tmp_path, warnings.append)] == ["run"]
    assert len(warnings) == 6
    for name in ("broken", "other", "list", "deep", "newer", "empty"):
        assert any(f"{name}.json" in line for line in warnings)


def test_a_missing_result_is_exit_code_2(tmp_path: Path) -> None:
    assert "peagle bench" in run("report", tmp_path, code=2)
    assert "does not exist" in run("report", tmp_path / "nowhere", code=2)


@pytest.mark.parametrize("field", ["name", "dtype", "weights", "sha", "revision"])
def test_different_targets_are_refused(tmp_path: Path, field: str) -> None:
    target = {"name": "x", "dtype": "float32", "weights": "Q4_1", "sha": "1", "revision": "r"}
    write(tmp_path, result("a", target=target))
    write(tmp_path, result("b", target=target | {field: "other"}))
    message = run("report", tmp_path, "--markdown", code=2)
    assert field in message and "folder of its own" in message


def test_unknown_facts_of_a_target_are_compatible(tmp_path: Path) -> None:
    write(tmp_path, result("a"))
    write(
        tmp_path,
        result(
            "b", gpu=True, target={"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": None}
        ),
    )
    assert len(read_results(tmp_path, print)) == 2


def test_invalid_numbers_are_ignored() -> None:
    assert [
        as_float(x) for x in (1, 2.5, None, "3", True, float("nan"), float("inf"), 10**400)
    ] == [
        1,
        2.5,
        *[None] * 6,
    ]
    # The method `none` needs no K.
    assert BenchCell.from_json(cell("s", "none", 0, 1) | {"k": None}) is not None
    for wrong in (
        {"k": -1},
        {"k": True},
        {"k": "x"},
        {"concurrency": 0},
        {"set": ""},
        {"method": 3},
    ):
        assert BenchCell.from_json(cell("s", "p-eagle", 3, 1) | wrong) is None


def test_one_run_has_no_spread() -> None:
    single = make_cell("none", 0, 1, 10.0, (10.0, 10.0))
    assert replace(single, repeats=1).spread is None
    assert make_cell("none", 0, 1, 10.0).spread is None and make_cell(
        "none", 0, 1, 10.0
    ).interval == (
        10.0,
        10.0,
    )


# Machines


def test_runs_of_one_machine_complete_each_other(tmp_path: Path) -> None:
    write(tmp_path, result("a", methods=("none",)))
    write(tmp_path, result("b", methods=("p-eagle",)))
    write(tmp_path, result("c", gpu=True))
    grouped = group_by_machine(read_results(tmp_path, print))
    assert [(m.label, len(m.results)) for m in grouped] == [
        ("AMD EPYC 9R14, 16 threads", 2),
        ("NVIDIA H200", 1),
    ]
    assert Grid(grouped[0].cells).methods == ["none", "p-eagle"]


def test_repeated_runs_are_pooled(tmp_path: Path) -> None:
    first, second = (
        result("a", methods=("none",), concurrency=(1,)),
        result("b", methods=("none",), concurrency=(1,)),
    )
    for content, speeds in ((first, [10.0, 11.0]), (second, [14.0, 15.0])):
        content["cells"][0] |= {
            "output_throughput_runs": speeds,
            "output_throughput": speeds[0],
            "failed": 1,
        }
        write(tmp_path, content)
    (pooled,) = group_by_machine(read_results(tmp_path, print))[0].cells
    assert pooled.throughput == 12.5 and pooled.spread == (10.0, 15.0) and pooled.failed == 2


def test_another_load_or_drafter_is_shown_separately(tmp_path: Path) -> None:
    write(tmp_path, result("a"))
    write(tmp_path, result("b", drafters={"p-eagle": {"trained": False}}))
    other = result("c")
    other["settings"]["max_tokens"] = 8
    write(tmp_path, other)
    labels = [m.label for m in group_by_machine(read_results(tmp_path, print))]
    assert len(set(labels)) == 3 and labels[0].endswith("(a)")


# Numbers


def test_overall_is_the_mean_of_speed_ups() -> None:
    speeds = {"a": (10.0, 20.0), "b": (10.0, 80.0)}
    cells = []
    for name, (none, fast) in speeds.items():
        for method, k, speed in (("none", 0, none), ("p-eagle", 7, fast)):
            cells.append(BenchCell(key=CellKey(name, method, k, 1), output_throughput=speed))
    # not measured for set b
    cells.append(BenchCell(key=CellKey("a", "p-eagle", 3, 1), output_throughput=5.0))
    by_set = grids_by_set(cells, set_names(cells))
    assert list(by_set) == [OVERALL, "a", "b"] and len(by_set[OVERALL].cells) == 2
    best = by_set[OVERALL].best(1)
    gain = by_set[OVERALL].speedup(best) if best else None
    assert gain is not None and gain.value == pytest.approx(4.0)  # the geometric mean of 2 and 8


def test_the_pareto_front() -> None:
    points = {
        (1, 100.0, 100.0),
        (2, 90.0, 180.0),
        (3, 60.0, 170.0),
        (4, 50.0, 300.0),
    }  # the third is dominated
    grid = Grid(
        BenchCell(
            key=CellKey("s", "p-eagle", 7, c), output_throughput=speed, per_user_throughput=user
        )
        for c, user, speed in points
    )
    assert [c.concurrency for c in grid.pareto_front()] == [1, 2, 4]


def test_figures_have_the_measured_numbers_and_descriptions(tmp_path: Path) -> None:
    path = write(tmp_path, result(ks=(3, 7, "auto"), concurrency=(1, 8)))
    grid = Grid(read_results(path, print)[0].cells)
    by_name = {figure.name: figure for figure in figures(grid)}
    assert list(by_name) == [
        "speedup",
        "over-eagle3",
        "pareto",
        "positions",
        "lengths",
        "k-p-eagle",
        "k-eagle3",
    ]
    labels = [line.label for line in by_name["speedup"].lines]
    assert labels == ["P-EAGLE K=3", "P-EAGLE K=7", "P-EAGLE K=auto", "EAGLE-3, best K"]
    point = by_name["speedup"].lines[1].points[0]
    fast, slow = grid.at("p-eagle", 7, 1), grid.none(1)
    assert (
        fast and slow and point.y == pytest.approx((fast.throughput or 0) / (slow.throughput or 1))
    )
    assert point.low is not None and point.high is not None and point.low < point.y < point.high
    for figure in by_name.values():
        assert all(line.label in figure.description for line in figure.lines) and re.search(
            r"\d at \d", figure.description
        )


def test_helpers() -> None:
    assert spaced([1, 2, 4, 8, 16, 32, 64], 4) == [1, 4, 16, 64]
    assert slug("../NVIDIA H200\n") == "nvidia-h200" and slug("../..") == "x"


# The verdict


def test_verdict_names_winner_and_gain() -> None:
    cells = [make_precise_cell("none", 0, 1, 10), make_precise_cell("p-eagle", 7, 1, 24)]
    cells += [make_precise_cell("none", 0, 32, 100), make_precise_cell("p-eagle", 7, 32, 80)]
    grid = Grid(cells)
    sentence = verdict(grid)
    assert sentence == (
        "P-EAGLE K=7 is fastest with 1 at a time: 2.40 times plain decoding;"
        " plain decoding (none) is fastest with 32 at a time."
    )


def test_verdict_lists_k_by_load() -> None:
    cells = [make_precise_cell("none", 0, c, 10.0 * c) for c in (1, 2, 4, 8)]
    cells += [make_precise_cell("p-eagle", 7 if c < 4 else 3, c, 20.0 * c) for c in (1, 2, 4, 8)]
    assert verdict(Grid(cells)) == (
        "P-EAGLE (K=7 from 1, K=3 from 4) is fastest with 1 to 8 at a time:"
        " 2.00 times plain decoding."
    )


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([], "Nothing could be measured"),
        ([make_cell("none", 0, 1, 10)], "nothing to compare"),
        ([make_cell("p-eagle", 7, 1, 10)], "was not measured, so no speed-up"),
        ([make_cell("none", 0, 1, 10), make_cell("p-eagle", 7, 2, 10)], "nothing can be compared"),
        (
            [make_cell("none", 0, 1, 10), make_cell("p-eagle", 7, 1, 9)],
            "No speculative method is faster",
        ),
        (
            [make_cell("none", 0, 1, 10), make_cell("p-eagle", 7, 1, 20)],
            "One run per cell: the spread is not known.",
        ),
        (
            [make_cell("none", 0, 1, 10, (9, 12)), make_cell("p-eagle", 7, 1, 11, (10, 13))],
            "No clear winner over plain",
        ),
        (
            [make_cell("none", 0, 1, 10, (9, 12)), make_cell("p-eagle", 7, 1, 9.5, (9, 11))],
            "within the spread",
        ),
        (
            [
                make_cell("none", 0, 1, 5, (5, 5)),
                make_cell("eagle3", 3, 1, 10, (9, 12)),
                make_cell("p-eagle", 7, 1, 11, (10, 13)),
            ],
            "EAGLE-3 and P-EAGLE are level",
        ),
    ],
)
def test_verdict_never_overstates(cells: list[BenchCell], words: str) -> None:
    assert words in verdict(Grid(cells))


def test_eagle3_sentence() -> None:
    cells = [make_cell("eagle3", 3, 1, 10, (9, 11)), make_cell("p-eagle", 7, 1, 12, (11.5, 13))]
    cells += [make_cell("eagle3", 3, 8, 10, (9, 11)), make_cell("p-eagle", 7, 8, 10.5, (10, 11))]
    sentence = eagle3_sentence(Grid(cells))
    assert sentence and "1.05 to 1.20 times" in sentence and "overlap with 8 at a time" in sentence
    assert eagle3_sentence(Grid([make_cell("none", 0, 1, 10)])) is None


# The page


class Reader(HTMLParser):
    """Collects the tags, ids and links of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.bare_headers = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        links = ("src", "href", "xlink:href", "action")
        self.links += [attributes[name] or "" for name in links if name in attributes]
        self.bare_headers += tag == "th" and "scope" not in attributes


def test_reports_are_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "in", result())
    for name in ("one", "two"):
        run("report", tmp_path / "in", "--out", tmp_path / name / "page.html")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert (
        "page.html" in files
        and sum(name.endswith(".png") for name in files) == 7
        and len(files) == 8
    )
    assert all(
        (tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in files
    )


def test_page_is_self_contained_and_accessible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each figure is drawn once for all sets and machines: numbers do not matter in this test."""
    pytest.importorskip("matplotlib")
    drawn: dict[str, tuple[str, bytes]] = {}

    def draw_once(figure: Figure, png_caption: str | None = None) -> tuple[str, bytes]:
        if figure.name not in drawn:
            drawn[figure.name] = draw(figure, png_caption)
        return drawn[figure.name]

    monkeypatch.setattr("peagle.report.panels.draw", draw_once)
    write(tmp_path, result("cpu", sets=("humaneval", "gsm8k")))
    write(tmp_path, result("gpu", sets=("humaneval", "gsm8k"), gpu=True))
    run("report", tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 14
    page = (tmp_path / "report.html").read_text()
    read = Reader(page)
    assert read.tags.count("h1") == 1 and read.tags.count("script") == 1 and read.bare_headers == 0
    assert len(set(read.ids)) == len(read.ids)
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert read.tags.count("svg") == read.tags.count("desc") == 3 * 2 * 7
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(read.ids)
    body = page[page.index("<body>") :]
    assert "http" not in body.replace("http://www.w3.org", "") and not re.search(
        "#[0-9a-f]{6}\\b", body
    )
    for words in (
        "AMD EPYC",
        "NVIDIA H200",
        "pass@1",
        "Copy the table",
        "answers identical",
        "peagle bench smollm2",
    ):
        assert words in page


def test_numbers_on_axes_are_not_rounded() -> None:
    pytest.importorskip("matplotlib")
    points = tuple(Point(x, x / 1000) for x in (1, 2, 3))
    svg, png = draw(Figure("f", "t", "x", "y", (Line("a", "s0", points),)))
    inlined = inline_svg(svg, "n", "t & t", "words")
    labels = re.findall(r">([^<>]*\.\d+)</text>", svg)
    assert png == b"" and labels and re.findall(r">([^<>]*\.\d+)</text>", inlined) == labels
    assert "t &amp; t</title>" in inlined and len(inlined) < len(svg)


def test_text_of_result_files_is_escaped(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evil = "\ud800<script>alert(1)</script><!-- --> \"'`|$x_1$"
    content = result(
        evil,
        sets=(evil,),
        pair=evil,
        command=evil,
        endpoint=evil,
        engine="endpoint",
        target={"name": evil},
    )
    for raw in content["cells"]:
        raw |= {"failed": 1, "first_error": evil}
        raw["method"] = evil if raw["method"] == "eagle3" else raw["method"]
        raw["check"] = {
            "compared": 1,
            "identical": 0,
            "differences": [{"task": evil, "at": evil, "margin": evil}],
        }
    content["environment"] = {evil: {evil: [evil]}}
    content["scores"] = [{"set": evil, "metric": evil, "value": evil}]
    (tmp_path / "run.json").write_text(json.dumps(content))
    run("report", tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert Reader(page).tags.count("script") == 1 and "<script>alert" not in page
    text = re.sub(r"\\.", "", run("report", tmp_path, "--markdown"))  # without escaped characters
    assert "<" not in re.sub(r"`[^`]*`", "", text) and "<!--" not in text and "-->" not in text


def test_the_table_counts_identical_answers(tmp_path: Path) -> None:
    sets = ("humaneval", "gsm8k")
    content = result(sets=sets, methods=("none", "p-eagle"), ks=(7,), concurrency=(1, 8))
    for raw in content["cells"]:
        if (raw["method"], raw["concurrency"]) == ("none", 8):
            raw["check"] = {"compared": 80, "identical": 76, "baseline_concurrency": 1}
    write(tmp_path, content)
    [machine] = group_by_machine(read_results(tmp_path, print))
    grids = grids_by_set(machine.cells, sets)
    for name, texts in (
        ("gsm8k", ["–", "80 of 80", "76 of 80", "80 of 80"]),
        (OVERALL, ["–", "160 of 160", "152 of 160", "160 of 160"]),
    ):
        table = cell_table(grids[name], name)
        column = table.columns.index("identical answers")
        assert [row[column] for row in table.rows] == texts


def test_the_exact_modes_of_a_run_are_shown(tmp_path: Path) -> None:
    old, new = (result(name, methods=("none", "p-eagle"), concurrency=(1,)) for name in "ab")
    for i, raw in enumerate(new["cells"]):
        raw["exact_mode"] = "batched" if i else "off"
    facts = []
    for content in (old, new):
        path = write(tmp_path, content)
        facts.append(run_facts(read_result(path))["run"].get("exact mode"))
    assert facts == [None, "off, batched"]


def test_missing_values_are_dashes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    needed = ("set", "method", "k", "concurrency", "output_throughput")
    bare = [{name: raw[name] for name in needed} for raw in result()["cells"]]
    odd = [
        cell("humaneval", "p-eagle", 11, 1)
        | dict.fromkeys(cell("a", "none", 0, 1).keys() - set(needed))
    ]
    odd += [
        cell("humaneval", "p-eagle", 11, 8)
        | dict.fromkeys(cell("a", "none", 0, 1).keys() - set(needed), "?")
    ]
    odd += [
        cell("humaneval", "p-eagle", 11, 64)
        | {"output_throughput": None, "failed": 80, "first_error": "503"}
    ]
    (tmp_path / "run.json").write_text(
        json.dumps({"format": "peagle-bench/1", "cells": bare + odd})
    )
    run("report", tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "–" in page and "503" in page and "None" not in page and "nan" not in page


def test_single_and_failed_cells_make_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for i, keep in enumerate((slice(0, 1), slice(3, 4))):
        content = result()
        content["cells"] = content["cells"][keep]
        run("report", write(tmp_path / str(i), content))
    content["cells"][0]["output_throughput"] = None
    run("report", write(tmp_path / "failed", content))
    assert "Nothing could be measured" in (tmp_path / "failed" / "report.html").read_text()


def test_missing_matplotlib_is_reported_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, result())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "peagle[bench]" in run("report", tmp_path, code=2)
    assert "| `none` | 1.00 |" in run("report", tmp_path, "--markdown")


def test_options_of_the_command(tmp_path: Path) -> None:
    write(tmp_path, result(sets=("humaneval", "gsm8k")))
    assert "mean of humaneval and gsm8k" in run("report", tmp_path, "--markdown")
    assert ", gsm8k," in run("report", tmp_path, "--markdown", "--set", "gsm8k")
    assert "humaneval, gsm8k" in run("report", tmp_path, "--markdown", "--set", "x", code=2)
    assert "--markdown" in run("report", tmp_path, "--set", "gsm8k", code=2)
    assert "is a folder" in run("report", tmp_path, "--out", tmp_path, code=2)


def test_markdown_marks_the_fastest(tmp_path: Path) -> None:
    write(tmp_path, result(ks=(7,), concurrency=(1, 64)))
    lines = markdown(group_by_machine(read_results(tmp_path, print))).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert (
        len({line.count("|") for line in table}) == 1
        and sum(line.count("**") for line in table) == 4
    )
    assert "c=1 | c=64" in table[0] and "bfloat16" in lines[0] and "`peagle bench" in lines[-1]


def test_trees_are_shown_separately_from_chains(tmp_path: Path) -> None:
    content = result(ks=(7,), concurrency=(1, 8), methods=("none", "p-eagle"))
    chains = [raw for raw in content["cells"] if raw["method"] == "p-eagle"]
    faster = [{"tree": 32, "output_throughput": 3 * raw["output_throughput"]} for raw in chains]
    trees = [
        raw | more | {"output_throughput_spread": None}
        for raw, more in zip(chains, faster, strict=True)
    ]
    trees = [raw | {"output_throughput_runs": [raw["output_throughput"]] * 3} for raw in trees]
    content["cells"] += trees
    content["scores"] += [content["scores"][-1] | {"tree": 32}]
    write(tmp_path / "results", content)
    [machine] = group_by_machine(read_results(tmp_path / "results", print))
    grid = grids_by_set(machine.cells, set_names(machine.cells))["humaneval"]
    assert grid.methods == ["none", "p-eagle", "p-eagle tree 32"] and len(grid.cells) == 6
    assert verdict(grid).startswith("P-EAGLE tree 32, K=7 is fastest")
    assert "| `p-eagle` K=7 |" in markdown([machine]) and "| `p-eagle tree 32`, K=7 |" in markdown(
        [machine]
    )
    drawn = {line.label: line.color for figure in figures(grid) for line in figure.lines}
    assert drawn["P-EAGLE tree 32, best K"] not in (drawn["P-EAGLE K=7"], "none", "eagle3")
    run("report", tmp_path / "results", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "P-EAGLE tree 32, K=7" in page and "P-EAGLE K=7" in page
    assert make_cell("p-eagle", 7, 1, 5.0).variant == "p-eagle"
    assert BenchCell.from_json(trees[0] | {"tree": "32"}) is None


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [LIGHT, DARK])
def test_contrast(colors: dict[str, str]) -> None:
    for ground in ("page", "card"):
        for text in ("ink", "muted", "p-eagle"):
            assert contrast(colors[text], colors[ground]) >= 4.5
        for mark in ("none", "eagle3", *SERIES_COLORS):
            assert contrast(colors[mark], colors[ground]) >= 3
    assert len({MARKERS[slot] for slot in SERIES_COLORS}) == len(SERIES_COLORS)
    assert len(set(LIGHT.values())) == len(LIGHT) and LIGHT.keys() == DARK.keys()

"""`peagle cost`: the model compared with the shipped measurements, the arithmetic, the command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.cost.figure import cost_figure
from peagle.cost.model import (
    mean_batch,
    modeled_throughput,
    predict_acceptance,
    tokens_per_second,
    what_if,
)
from peagle.cost.offers import best_ks, cheapest_by_method, measured_offers, pareto_front
from peagle.cost.terms import Terms, cost_per_million
from peagle.errors import UserError
from peagle.report.grid import Grid
from peagle.results.cell import BenchCell
from peagle.results.run_file import read_result
from tests.support.bench.results import result, write

ROOT = Path(__file__).parents[2]
H200 = ROOT / "docs" / "results" / "h200" / "h200.json"


@pytest.fixture(scope="module")
def shipped() -> Grid:
    return Grid(read_result(H200).cells)


def make_cell(method: str, k: int, c: int, speed: float, **more: Any) -> BenchCell:
    cell = BenchCell.from_json(
        {"set": "s", "method": method, "k": k, "concurrency": c, "output_throughput": speed} | more
    )
    assert cell is not None
    return cell


def small() -> Grid:
    return Grid(
        [
            make_cell("none", 0, 1, 100, mean_tpot_ms=10),
            make_cell("p-eagle", 3, 1, 250, mean_tpot_ms=4),
            make_cell("p-eagle", 5, 1, 200, mean_tpot_ms=5),
            make_cell("none", 0, 8, 500, mean_tpot_ms=16),
            make_cell("p-eagle", 3, 8, 800, mean_tpot_ms=10),
        ]
    )


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cost", *map(str, args)], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if code == 0 else result.stderr


def test_the_model_is_accurate_with_the_measured_batch_size(shipped: Grid) -> None:
    """The remaining difference, up to a fifth, is the time between steps."""
    for cell in shipped.measured:
        modeled = modeled_throughput(cell)
        assert modeled is not None and cell.throughput is not None
        assert 1 < modeled / cell.throughput < 1.25, (cell.key, modeled / cell.throughput)


def test_the_model_with_concurrency_as_batch_size_is_an_upper_bound(shipped: Grid) -> None:
    """The bound is close at concurrency 1, and twice too high at 64."""
    over = {}
    for cell in shipped.measured:
        step = cell.step_ms
        length = cell.spec_decode_acceptance_length or 1.0
        assert step and cell.throughput
        over.setdefault(cell.concurrency, []).append(
            tokens_per_second(cell.concurrency, length, step) / cell.throughput
        )
    assert all(ratio > 1 for ratios in over.values() for ratio in ratios)
    assert max(over[1]) < 1.1 and max(over[4]) < 1.27 and min(over[64]) > 2
    full = shipped.none(64)
    assert full is not None and mean_batch(full) == pytest.approx(32.1, abs=0.1)


def without(grid: Grid, method: str, k: int) -> Grid:
    return Grid(cell for cell in grid.cells if (cell.variant, cell.k) != (method, k))


@pytest.mark.parametrize("method", ["eagle3", "p-eagle"])
@pytest.mark.parametrize("k", [5, 7])
def test_what_if_predicts_a_k_that_was_left_out(shipped: Grid, method: str, k: int) -> None:
    """Up to concurrency 4, throughput is predicted within 7 % and TPOT within 9 %."""
    rest = without(shipped, method, k)
    for concurrency in (1, 2, 4):
        base, real = rest.best(concurrency, method), shipped.at(method, k, concurrency)
        assert base is not None and real is not None and real.throughput is not None
        predicted = what_if(rest, base, k)
        assert predicted.throughput == pytest.approx(real.throughput, rel=0.07), (
            concurrency,
            predicted.throughput,
        )
        assert predicted.mean_tpot_ms == pytest.approx(real.mean_tpot_ms, rel=0.09)


def test_what_if_scales_throughput_and_tpot() -> None:
    more = {
        "step_ms": 10.0,
        "spec_decode_acceptance_length": 2.0,
        "mean_tpot_ms": 5.0,
        "per_user_throughput": 100.0,
    }
    # The model predicts 200 tokens/s, so half of the time is spent between steps.
    cell = make_cell("p-eagle", 3, 1, 100.0, **more)
    grid = Grid([cell])
    same, twice = what_if(grid, cell, 3), what_if(grid, cell, 3, 4.0)
    assert same.throughput == pytest.approx(100) and twice.throughput == pytest.approx(
        1 / (1 / 400 + 1 / 200)
    )
    assert twice.mean_tpot_ms == pytest.approx(2.5)
    assert twice.per_user_throughput == twice.throughput
    with pytest.raises(UserError, match="use `k` 3"):
        what_if(grid, cell, 5, 3.0)


@pytest.mark.parametrize(
    ("method", "k"), [("p-eagle", 3), ("p-eagle", 5), ("p-eagle", 7), ("eagle3", 5)]
)
def test_the_acceptance_of_another_k_follows_from_position_rates(
    shipped: Grid, method: str, k: int
) -> None:
    cell = shipped.at(method, 11, 1)
    real = shipped.at(method, k, 1)
    assert cell is not None and real is not None
    length = real.spec_decode_acceptance_length
    assert predict_acceptance(shipped, cell, k) == length
    assert predict_acceptance(without(shipped, method, k), cell, k) == pytest.approx(
        length, rel=0.05
    )
    with pytest.raises(UserError, match="`acceptance`"):
        predict_acceptance(shipped, cell, 12)


def test_cost_of_a_million_tokens() -> None:
    assert cost_per_million(1000, 3.6) == pytest.approx(1.0) and cost_per_million(0, 3.6) == float(
        "inf"
    )
    assert Terms(3.6, gpus=2, busy=0.5).cost_per_million(1000) == pytest.approx(4.0)


def test_number_of_gpus() -> None:
    by_form = {
        (o.cell.variant, o.cell.k, o.cell.concurrency): o
        for o in measured_offers(small(), Terms(2.0, gpus=2, load=1000))
    }
    plain, drafted = by_form["none", 0, 8], by_form["p-eagle", 3, 8]
    assert (plain.gpus, plain.per_hour, drafted.gpus) == (
        4,
        8.0,
        4,
    )  # 2 replicas of 500 or 800 tokens/s
    assert (
        plain.per_gpu == 250
        and drafted.saving == pytest.approx(1 - 500 / 800)
        and plain.saving is None
    )
    assert Terms(1, users=17).replicas(1e9, 8) == 3 and Terms(1, users=16).replicas(1e9, 8) == 2
    assert Terms(1, load=1000, busy=0.5).replicas(500, 8) == 4 and Terms(1).replicas(500, 8) is None
    assert Terms(1, load=1000, users=80).replicas(500, 8) == 10  # the larger of both requirements


def test_the_cheapest_offer_of_a_method_depends_on_the_tpot_limit() -> None:
    free, bound = (
        measured_offers(small(), Terms(1.0)),
        measured_offers(small(), Terms(1.0, tpot_ms=10)),
    )
    assert {m: o.cell.concurrency for m, o in cheapest_by_method(free).items()} == {
        "none": 8,
        "p-eagle": 8,
    }
    assert {m: o.cell.concurrency for m, o in cheapest_by_method(bound).items()} == {
        "none": 1,
        "p-eagle": 8,
    }
    assert set(cheapest_by_method(measured_offers(small(), Terms(1.0, tpot_ms=9)))) == {"p-eagle"}
    assert [o.cell.k for o in best_ks(free) if o.cell.concurrency == 1] == [0, 3]


def test_the_pareto_front_of_one_method() -> None:
    kept = pareto_front(
        o for o in measured_offers(small(), Terms(1.0)) if o.cell.variant == "p-eagle"
    )
    assert [(o.cell.k, o.cell.concurrency) for o in kept] == [(3, 1), (3, 8)], (
        "K=5 is slower and more expensive than K=3"
    )
    drawn = cost_figure(measured_offers(small(), Terms(3.6)))
    assert [line.label for line in drawn.lines] == ["none", "P-EAGLE"]
    assert drawn.lines[0].points[0].y == pytest.approx(10.0) and drawn.lines[0].points[0].x == 100


@pytest.mark.parametrize(
    "wrong", [("price", 0), ("gpus", 0), ("busy", 1.1), ("tpot_ms", 0), ("load", -5)]
)
def test_invalid_terms_are_refused(wrong: tuple[str, Any]) -> None:
    with pytest.raises(UserError, match=f"`{wrong[0]}`"):
        Terms(**{"price": 1.0} | dict([wrong]))


def test_the_table_fits_a_terminal() -> None:
    text = run(
        H200,
        "--price",
        "4.98",
        "--users",
        "500",
        "--tpot-ms",
        "0.6",
        "--acceptance",
        "4.5",
        "-k",
        "9",
    )
    table = [line for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert len(table) == 7 * 4 and all(len(line) <= 80 for line in table)
    assert (
        "P-EAGLE K=9 if" in text
        and "none: at no measured concurrency within 0.6 ms a token" in text
    )
    assert "GPUs" in text and "an hour" in text


def test_json_output(tmp_path: Path) -> None:
    file = write(tmp_path, result(ks=(3, 7), concurrency=(1, 8)))
    content = json.loads(run(file, "--price", 3.6, "--load", 1e5, "--json"))
    assert (
        content["terms"]["price"] == 3.6
        and content["set"] == "humaneval"
        and len(content["offers"]) == 6
    )
    assert len(json.loads(run(file, "--price", 3.6, "--all", "--json"))["offers"]) == 10
    supposed = json.loads(run(file, "--price", 3.6, "-k", 5, "--acceptance", 3, "--all", "--json"))[
        "offers"
    ]
    assert [(o["k"], o["acceptance_length"]) for o in supposed if o["assumed"]] == [(5, 3), (5, 3)]
    cheapest = content["cheapest"]["p-eagle"]
    assert cheapest["per_million"] == pytest.approx(1000 / cheapest["per_gpu"]) and cheapest[
        "gpus"
    ] == -(-1e5 // cheapest["per_gpu"])


def test_numbers_given_as_options() -> None:
    content = json.loads(
        run("--price", 3.6, "--acceptance", 3, "--step-ms", 12, "--concurrency", 8, "--json")
    )
    [offer] = content["offers"]
    numbers = (offer["per_gpu"], offer["per_million"], offer["tpot_ms"])
    assert numbers == pytest.approx((2000, 0.5, 4))
    assert "1.00" in run("--price", 3.6, "--tokens-per-second", 1000)


def test_a_figure_is_written(tmp_path: Path) -> None:
    run(H200, "--price", "4.98", "--plot", tmp_path / "a" / "cost.png")
    assert (tmp_path / "a" / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--price", 1], "--step-ms"),
        (["--price", 0, "--tokens-per-second", 5], "--price"),
        (["--price", 1, "--tokens-per-second", 5, "--step-ms", 5], "--step-ms"),
        (["--price", 1, "--step-ms", 5, "--acceptance", 0.5], "--acceptance"),
        ([H200, "--price", 1, "--step-ms", 5], "DIR"),
        ([H200, "--price", 1, "--acceptance", 5, "-k", 3], "4 tokens at most"),
        ([H200, "--price", 1, "-k", 20], "--acceptance"),
        ([H200, "--price", 1, "-k", 3, "--method", "none"], "--method"),
        ([H200, "--price", 1, "--set", "nothing"], "humaneval"),
    ],
)
def test_mistakes_are_reported(asked: list[object], words: str) -> None:
    assert words in run(*asked, code=2)
    assert "Missing option '--price'" in run(H200, code=2)


def test_one_price_for_several_machines_is_refused(tmp_path: Path) -> None:
    write(tmp_path, result("a"))
    write(tmp_path, result("b", gpu=True))
    assert "one file" in run(tmp_path, "--price", 1, code=2)


def test_the_documentation_shows_the_output_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "scale.md").read_text()
    examples = re.findall(
        r"^    peagle cost ([^|\n]*).*?^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert len(examples) == 2
    for command, block in examples:
        printed = [line.rstrip() for line in run(*command.split()).splitlines()]
        shown = block.splitlines()
        assert printed[-len(shown) :] == shown

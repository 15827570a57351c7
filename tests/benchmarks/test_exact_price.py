"""benchmarks/exact/price.py: the cost of exact mode, measured with a tiny pair."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.exact.engines import NONE, Asked, Drafting, Speed
from benchmarks.exact.part_report import PartReport
from benchmarks.exact.price import ACCEPTANCE, PriceLoad, measure_price, price_cell
from peagle.bench.random_models import random_pair
from peagle.draft_shape import DraftShape
from peagle.engine.sampling.forced_acceptance import expected_length
from tests.support.kernels.cpu_features import needs_c

LOAD = PriceLoad(
    [Asked([first, 2, 3], {"max_tokens": 24, "ignore_eos": True}) for first in range(4)],
    {1: 1, 4: 4},
    repeats=2,
)


def test_percentages_compare_runs_of_the_same_pair() -> None:
    """The second pair of runs is slower in both modes, which does not affect the percentages."""
    runs = [
        (Speed(1000, 2.0, 1.0, 7), Speed(900, 2.0, 1.1, 7)),
        (Speed(500, 2.0, 2.0, 7), Speed(460, 2.0, 2.16, 7)),
    ]
    cell = price_cell("tiny", NONE, False, "batched", 8, runs)
    assert (cell.percent.low, cell.percent.high) == (8.0, 10.0)
    assert (cell.step_percent.low, cell.step_percent.high) == (8.0, 10.0)
    assert cell.fast.tokens_per_second.median == 750
    assert "8: tokens/s 750 (500..1,000) -> 680 (460..900), 9.0 (8.0..10.0) % fewer" in cell.line()


@needs_c
def test_forced_acceptance_is_equal_in_both_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = PartReport(tmp_path / "price.json", seconds=3600)
    pair = random_pair("tiny", "cpu", torch.bfloat16)
    draftings = [NONE, Drafting("p-eagle", 7), Drafting("p-eagle", 7, 15)]
    measure_price(report, "tiny", pair, draftings, ["natural", "forced"], LOAD)
    cells = json.loads((tmp_path / "price.json").read_text())
    assert cells == report.records
    kinds = [(cell["drafting"], cell["acceptance"], cell["requests"]) for cell in cells]
    assert kinds[:4] == [("none", "natural", 1), ("none", "natural", 4)] + [
        ("p-eagle K=7", "natural", requests) for requests in (1, 4)
    ]
    assert len(kinds) == len(set(kinds)) == 2 * (1 + 2 * 2), "`none` has nothing to force"
    for cell in cells:
        assert cell["exact_mode"] == "batched"
        assert cell["repeats"] == 2 and cell["exact"]["step_ms"]["low"] > 0
        if cell["acceptance"] == "forced":
            assert cell["fast"]["length"] == cell["exact"]["length"] > 2
    last = cells[-1]["fast"]
    assert last["nodes"] == [15, 15]
    assert last["length"] == pytest.approx(expected_length(ACCEPTANCE, DraftShape(7, 15)), rel=0.25)
    assert capsys.readouterr().out.count("% longer") == len(cells)


@needs_c
def test_time_limits_are_honored(tmp_path: Path) -> None:
    report = PartReport(tmp_path / "price.json", seconds=0)
    pair = random_pair("tiny", "cpu", torch.bfloat16)
    measure_price(report, "tiny", pair, [NONE, Drafting("p-eagle", 7)], ["forced"], LOAD)
    assert [record["skipped"] for record in report.records] == ["forced", "forced"]

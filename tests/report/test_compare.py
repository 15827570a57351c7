"""`peagle compare`: ratios, directions, noise, exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from tests.support.bench.results import result, write

Change = Callable[[dict[str, Any]], None]


def pair(tmp_path: Path, change: Change = lambda _: None, **changes: Any) -> tuple[Path, Path]:
    after = result("after", ks=(7,), concurrency=(1, 8), **changes)
    for cell in after["cells"]:
        change(cell)
    return write(tmp_path, result("before", ks=(7,), concurrency=(1, 8))), write(tmp_path, after)


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, args)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def slower(by: float, spread: float = 0.02) -> Change:
    """Make the P-EAGLE cells slower."""

    def change(cell: dict[str, Any]) -> None:
        if cell["method"] == "p-eagle":
            speed = cell["output_throughput"] * (1 - by)
            runs = [speed * (1 - spread), speed, speed * (1 + spread)]
            cell |= {"output_throughput": speed, "output_throughput_runs": runs}
            cell["output_throughput_spread"] = [runs[0], runs[2]]

    return change


def test_equal_results(tmp_path: Path) -> None:
    code, out, _ = run(*pair(tmp_path))
    assert code == 0 and "0 of 6 worse by more than 5.0%" in out


def test_a_regression_is_reported(tmp_path: Path) -> None:
    code, out, err = run(*pair(tmp_path, slower(0.2)))
    assert code == 1 and "2 of 6 worse" in out
    assert (
        "regression: humaneval, P-EAGLE K=7, 8 at a time: output_throughput 0.800 of before" in err
    )


def test_the_threshold_is_an_option(tmp_path: Path) -> None:
    files = pair(tmp_path, slower(0.2, 0.001))
    assert run(*files, "--threshold", "25%")[0] == 0 and run(*files, "--threshold", "0.19")[0] == 1
    for wrong in ("5", "x", "-1%", "100%", "nan"):
        assert run(*files, "--threshold", wrong)[0] == 2


def test_changes_within_both_spreads_are_noise(tmp_path: Path) -> None:
    files = pair(tmp_path, slower(0.08, 0.09))
    code, out, _ = run(*files)
    assert code == 0 and "2 within both spreads" in out and "noise" in out
    assert run(*files, "--strict")[0] == 1


def test_single_runs_have_no_noise_range(tmp_path: Path) -> None:
    def change(cell: dict[str, Any]) -> None:
        slower(0.08, 0.09)(cell)
        cell["repeats"] = 1

    assert run(*pair(tmp_path, change))[0] == 1


def test_lower_latency_is_better(tmp_path: Path) -> None:
    def change(cell: dict[str, Any]) -> None:
        cell["mean_ttft_ms"] *= 1.5
        cell["median_itl_ms"] *= 0.5

    files = pair(tmp_path, change)
    code, _, err = run(*files, "--metric", "output_throughput,mean_ttft_ms")
    assert code == 1 and "mean_ttft_ms 1.500 of before" in err
    assert run(*files, "--metric", "median_itl_ms")[0] == 0
    assert run(*files)[0] == 0


def test_unmeasured_metrics_are_not_regressions(tmp_path: Path) -> None:
    code, out, _ = run(*pair(tmp_path), "--metric", "joules_per_token")
    assert code == 0 and "6 not measured" in out
    code, _, err = run(*pair(tmp_path), "--metric", "output_troughput")
    assert code == 2 and "Did you mean 'output_throughput'?" in err


def test_missing_values_are_a_regression(tmp_path: Path) -> None:
    for gone in (None, 0):
        code, _, err = run(
            *pair(tmp_path, lambda cell, gone=gone: cell.update(output_throughput=gone))
        )
        assert code == 1 and "no longer there" in err


def test_different_targets_need_force(tmp_path: Path) -> None:
    files = pair(tmp_path, target={"name": "other"})
    code, _, err = run(*files)
    assert code == 2 and "--force" in err
    assert run(*files, "--force")[0] == 0


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    good, _ = pair(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    for wrong in ("bad.json", "nowhere.json"):
        assert run(good, tmp_path / wrong)[0] == 2
    alone = write(tmp_path, result("alone", sets=("gsm8k",)))
    code, _, err = run(good, alone)
    assert code == 2 and "no cell in common" in err


def test_differences_of_runs_are_noted(tmp_path: Path) -> None:
    def change(cell: dict[str, Any]) -> None:
        cell["failed"] = 1
        cell["concurrency"] = 4 if cell["concurrency"] == 8 else 1

    _, _, err = run(*pair(tmp_path, change, gpu=True))
    assert (
        "environment differs" in err
        and "3 cells only in before.json" in err
        and "failed requests: 0 and 3" in err
    )


def test_json_output(tmp_path: Path) -> None:
    files = pair(tmp_path, slower(0.2))
    code, out, _ = run(*files, "--json")
    comparison = json.loads(out)
    assert code == 1 and comparison["regressions"] == 2 and len(comparison["changes"]) == 6
    worst = comparison["changes"][-1]
    assert (
        worst["outcome"] == "worse"
        and worst["ratio"] == pytest.approx(0.8)
        and worst["low"] < 0.8 < worst["high"]
    )

"""Tuning: the search for the best K, the stored result, and its use."""

from pathlib import Path

import pytest

from peagle.bench.tune import TunePoint, Tuner, expected_tokens, search_k
from peagle.catalog.pair import Best, Pair, TargetSource
from peagle.catalog.tuned import machine_of, read_tuned, tuned_path, write_tuned
from peagle.cli.measurement.tune_output import summary_lines
from tests.support.bench.benching import some_jobs, tiny_pair

RATES = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05, 0.03, 0.02, 0.01, 0.01)  # Qwen3-8B on gsm8k
KS = (1, 2, 3, 4, 5, 6, 7, 9, 11)


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.03, 0.08, 0.2, 0.6])
@pytest.mark.parametrize("start", [1, 3, 7, 11])
def test_the_best_k_is_found(slope: float, start: int) -> None:
    def throughput(k: int) -> float:
        return 100 * expected_tokens(RATES, k) / (1 + slope * k)

    measured: list[int] = []

    def measure(k: int) -> TunePoint:
        measured.append(k)
        return TunePoint(throughput(k), 10 * (1 + slope * k))

    points = search_k(measure, RATES, KS, start)
    best = max(point.throughput for point in points.values())
    assert best >= 0.985 * max(map(throughput, KS))
    assert len(measured) == len(set(measured)) <= 4


def test_a_single_k_is_measured_once() -> None:
    assert list(search_k(lambda k: TunePoint(1.0, 1.0), RATES, (5,), 3)) == [5]


def test_a_pair_is_tuned() -> None:
    from peagle.bench.load.native import NativeRunner

    jobs = some_jobs(6, max_tokens=8)
    tuner = Tuner(
        NativeRunner(tiny_pair(), jobs, 2, 0.0, exact=False, warmup=2), jobs, ["p-eagle"], (1, 3)
    )
    best = {c: tuner.tune(c, 3) for c in (1, 2)}
    assert {(c, k) for _, k, c in tuner.points} >= {(1, 0), (1, 3), (1, 1), (2, 0), (2, 3), (2, 1)}
    assert len(tuner.position_rates["p-eagle"]) == 3
    lines = summary_lines(tuner, best, 4.5)
    assert len(lines) == 3
    assert "c=2" in lines[0] and "by position" in lines[1] and "at 4.5 an hour" in lines[2]
    assert "--price" in summary_lines(tuner, best, None)[2]


def test_stored_weights_have_their_own_tuned_entry() -> None:
    plain, stored = (machine_of("cpu", "torch.float32", x) for x in (None, "Q4_1"))
    assert plain.endswith(", float32") and stored == f"{plain}, Q4_1"


def test_tuned_entries_are_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    pair = Pair("some-pair", TargetSource(()), {}, k=5)
    assert read_tuned(pair, "this") == {}
    entry = {"by_concurrency": [{"concurrency": 8, "method": "eagle3", "k": 3}]}
    path = write_tuned(pair, "this", entry)
    assert path == tmp_path / "pairs" / "some-pair.json"
    write_tuned(pair, "that", {"by_concurrency": []})
    assert read_tuned(pair, "this") == {8: Best("eagle3", 3)}
    assert read_tuned(pair, "that") == read_tuned(pair, "other") == {}
    path.write_text("{")
    assert read_tuned(pair, "this") == {}
    folder = Pair(str(tmp_path / "t"), TargetSource(("folder",), folder=tmp_path / "t"), {})
    assert tuned_path(folder).name.startswith("t-")


def test_the_entry_of_the_nearest_lower_load_is_used() -> None:
    pair = Pair("x", TargetSource(()), {}, k=5)
    assert pair.best(3) == Best("p-eagle", 5)
    tuned = Pair(
        "x", TargetSource(()), {}, k_by_concurrency={2: Best("p-eagle", 7), 8: Best("none", 0)}
    )
    assert [tuned.best(c).k for c in (1, 2, 7, 8, 99)] == [7, 7, 7, 0, 0]

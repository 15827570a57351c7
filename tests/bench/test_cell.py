"""Metrics of a cell: vLLM's definitions, medians over runs, the order of cells."""

import pytest

from peagle.bench.order import schedule_runs
from peagle.bench.settings import BenchSettings
from peagle.cli.measurement.lists import parse_counts, parse_ks, parse_trees
from peagle.errors import UserError
from peagle.results.cell import BenchCell, median_value
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey, cell_keys
from peagle.results.request_record import RequestRecord
from peagle.results.spec_counters import SpecCounters

KEY = CellKey("humaneval", "p-eagle", 5, 2)
CELL_FIELDS = {
    "set",
    "method",
    "k",
    "concurrency",
    "tree",
    "requests",
    "failed",
    "first_error",
    "repeats",
    "duration",
    "total_output_tokens",
    "output_throughput",
    "output_throughput_runs",
    "output_throughput_spread",
    "request_throughput",
    "per_user_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
    "step_ms",
    "drafter_share",
    "k_steps",
    "gpu_memory_bytes",
    "energy_joules",
    "joules_per_token",
    "check",
}


def some_run(scale: float = 1.0) -> CellRun:
    """Two answers of 5 and 1 tokens, and one that failed after a piece."""
    return CellRun(
        [
            RequestRecord("a", 0, 10.0, [10.5, 10.7, 11.1], tokens=5),
            RequestRecord("b", 0, 10.0, [10.1], tokens=1),
            RequestRecord("c", 0, 10.0, [10.2], tokens=9, error="broke"),
        ],
        duration=2.0 * scale,
        spec=SpecCounters(4, 20, 8, [4, 4, 4, 4, 4], [4, 2, 1, 1, 0]),
        k_steps={5: 4},
        energy_joules=12.0,
    )


def test_metrics_of_a_run() -> None:
    metrics = some_run().metrics()
    assert (metrics.requests, metrics.failed, metrics.first_error) == (3, 1, "broke")
    assert metrics.total_output_tokens == 6
    assert metrics.output_throughput == 3
    assert metrics.request_throughput == 1
    assert metrics.per_user_throughput == pytest.approx((5 / 1.1 + 1 / 0.1) / 2)
    assert metrics.mean_ttft_ms == pytest.approx(300)
    assert metrics.mean_tpot_ms == pytest.approx(600 / 4)  # An answer of one token has no TPOT.
    assert metrics.median_itl_ms == pytest.approx(300)
    assert metrics.p99_itl_ms == pytest.approx(398)
    assert metrics.spec_decode_acceptance_rate == 40  # in percent, as in vLLM
    assert metrics.spec_decode_acceptance_length == 3
    assert metrics.spec_decode_per_position_acceptance_rates == (1, 0.5, 0.25, 0.25, 0)
    assert metrics.joules_per_token == 2


def test_metrics_of_a_run_without_answers() -> None:
    metrics = CellRun([RequestRecord("a", 0, 1.0, error="down")], 0.0).metrics()
    assert metrics.output_throughput == 0
    assert (
        metrics.median_ttft_ms
        is metrics.per_user_throughput
        is metrics.spec_decode_acceptance_length
        is None
    )


def test_a_cell_is_the_median_of_its_runs() -> None:
    record = BenchCell.from_runs(KEY, [some_run(scale).metrics() for scale in (1, 2, 4)])
    cell = record.to_json()
    assert set(cell) == CELL_FIELDS
    assert BenchCell.from_json(cell) == record
    assert cell["output_throughput"] == 1.5
    assert cell["output_throughput_runs"] == [3, 1.5, 0.75]
    assert cell["output_throughput_spread"] == [0.75, 3]
    assert (cell["repeats"], cell["failed"], cell["requests"]) == (3, 1, 3)
    assert cell["k_steps"] == {"5": 4}
    assert isinstance(cell["total_output_tokens"], int)


def test_medians_of_lists_are_elementwise() -> None:
    assert median_value([None, None]) is None
    assert median_value([(1.0, 2.0), (3.0,)]) == (2.0, 2.0)
    assert median_value([{3: 4}, {3: 6, 11: 2}]) == {3: 5, 11: 1}


def test_differences_of_counters() -> None:
    apart = SpecCounters(5, 20, 9, [5, 5], [5, 4]).minus(SpecCounters(2, 8, 3, [2], [2]))
    assert apart == SpecCounters(3, 12, 6, [3, 5], [3, 4])


def test_every_cell_once_and_methods_side_by_side() -> None:
    keys = cell_keys(["a", "b"], ["none", "eagle3", "p-eagle"], [3, 5], [1, 8])
    assert len(keys) == len(set(keys)) == 2 * 2 * 5
    assert sum(key.method == "none" for key in keys) == 4
    schedule = schedule_runs(keys, 3, seed=0)
    assert schedule == schedule_runs(keys, 3, seed=0)
    assert [run.repeat for run in schedule] == [0] * 20 + [1] * 20 + [2] * 20
    groups = [schedule[i : i + 5] for i in range(0, 60, 5)]
    assert all(len({(run.key.set, run.key.concurrency) for run in group}) == 1 for group in groups)
    assert len({tuple(run.key.method for run in group) for group in groups}) > 1  # shuffled


def test_trees_have_their_own_cells() -> None:
    keys = cell_keys(["a"], ["none", "eagle3", "p-eagle"], [3, "auto"], [1], [0, 32])
    assert [(key.method, key.k, key.tree) for key in keys] == [
        ("none", 0, 0),
        ("eagle3", 3, 0),
        ("eagle3", "auto", 0),
        ("p-eagle", 3, 0),
        ("p-eagle", "auto", 0),
        ("p-eagle", 3, 32),
        ("p-eagle", "auto", 32),
    ]
    names = [str(key) for key in keys]
    assert len(set(names)) == len(names)
    assert (
        names[0] == "a none c=1"
        and names[3] == "a p-eagle K=3 c=1"
        and names[5] == "a p-eagle tree 32, K=3 c=1"
    )


def test_settings_of_trees() -> None:
    chains = BenchSettings(("a",), ("p-eagle",), (3,), (1,))
    assert "tree" not in chains.to_json()  # Runs that are older than tree drafting can be resumed.
    assert BenchSettings(("a",), ("p-eagle",), (3,), (1,), tree=(0, 16)).to_json()["tree"] == [
        0,
        16,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("none", "eagle3")}, "needs a p-eagle drafter"),
        ({"k": (3, 16)}, "is a chain"),
        ({"k": (17,)}, "more nodes than K"),
        ({"tree": (0, 63)}, "at most 62 nodes"),
    ],
)
def test_invalid_trees_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        BenchSettings(
            **{"sets": ("a",), "methods": (), "k": (3, "auto"), "concurrency": (1,), "tree": (16,)}
            | change
        )


def test_comma_separated_lists_are_parsed() -> None:
    assert parse_trees("0, 32,32") == (0, 32)
    assert parse_ks("3, 5,auto,3") == (3, 5, "auto")
    assert parse_counts("8,1,8") == (8, 1)
    for text in ("", "x", "3,,5", "1.5", "-1"):
        with pytest.raises(UserError, match="write it like"):
            parse_ks(text)
        with pytest.raises(UserError, match="write it like"):
            parse_counts(text)
        with pytest.raises(UserError, match="write it like"):
            parse_trees(text)
    with pytest.raises(UserError, match="at least one token"):
        parse_ks("0")


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"repeats": 0}, {"temperature": -1}, {"concurrency": (5000,)}]
)
def test_invalid_settings_are_refused(bad: dict) -> None:
    with pytest.raises(UserError, match="must be"):
        BenchSettings(
            **{"sets": ("a",), "methods": ("none",), "k": (3,), "concurrency": (1,)} | bad
        )

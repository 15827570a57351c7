"""The load on peagle's engine: every method gives the same answers, and the counts are correct."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.bench.load.energy import EnergyMeter
from peagle.bench.load.jobs import LoadJob
from peagle.bench.load.native import NativeRunner
from peagle.bench.quality.output_check import check_answers, target_margin
from peagle.data.bench import Task
from peagle.results.key import CellKey
from peagle.results.quality import OutputCheck
from tests.support.bench.benching import some_jobs, tiny_pair


def native(jobs: list[LoadJob], concurrency: int = 4, temperature: float = 0.0) -> NativeRunner:
    return NativeRunner(tiny_pair(), jobs, concurrency, temperature, exact=False, warmup=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_methods_agree_under_any_load(temperature: float) -> None:
    jobs = some_jobs(5, turns=2)
    runner = native(jobs, temperature=temperature)
    runs = {}
    for key in (
        CellKey("x", "none", 0, 1),
        CellKey("x", "none", 0, 4),
        CellKey("x", "p-eagle", 11, 4),
        CellKey("x", "eagle3", 3, 2),
    ):
        runs[key] = runner.run(key, jobs, lambda: None)
    answers = [{(r.task, r.turn): r.ids for r in run.records} for run in runs.values()]
    assert all(ids == answers[0] for ids in answers)
    assert sorted(answers[0]) == sorted((str(i), turn) for i in range(5) for turn in range(2))
    runner.close()
    assert not runner.pool.engines


def test_metrics_of_a_run() -> None:
    jobs, seen = some_jobs(6, max_tokens=9), []
    runner = native(jobs)
    run = runner.run(CellKey("x", "p-eagle", 3, 2), jobs, lambda: seen.append(1))
    assert len(seen) == len(run.records) == 6
    assert all(record.tokens == len(record.ids) == 9 for record in run.records)
    assert all(record.start < record.arrivals[0] <= record.arrivals[-1] for record in run.records)
    metrics = run.metrics()
    assert metrics.failed == 0
    assert metrics.total_output_tokens == 54
    assert metrics.spec_decode_draft_tokens == 3 * metrics.spec_decode_num_drafts
    assert len(metrics.spec_decode_per_position_acceptance_rates) == 3
    assert sum(metrics.k_steps.values()) > 0 and set(metrics.k_steps) <= {3}
    assert 0 < metrics.drafter_share < 1
    assert metrics.step_ms > 0
    assert metrics.gpu_memory_bytes is metrics.energy_joules is None
    plain = runner.run(CellKey("x", "none", 0, 2), jobs, lambda: None).metrics()
    assert plain.spec_decode_acceptance_length is None
    assert plain.drafter_share == 0
    starts = sorted(record.start for record in run.records)
    # never more than two users
    assert starts[1] < min(record.arrivals[-1] for record in run.records) < starts[2]


@pytest.mark.parametrize("k", [3, "auto"])
def test_trees(k: int | str) -> None:
    jobs = some_jobs(4)
    runner = native(jobs)
    plain, trees = (
        runner.run(key, jobs, lambda: None)
        for key in (CellKey("x", "none", 0, 2), CellKey("x", "p-eagle", k, 2, 12))
    )
    assert [r.ids for r in sorted(plain.records, key=lambda r: r.task)] == [
        r.ids for r in sorted(trees.records, key=lambda r: r.task)
    ]
    assert 12 in trees.k_steps and (k == "auto" or set(trees.k_steps) == {12})
    assert trees.spec is not None and len(trees.spec.tried_at) == (3 if k == 3 else 7)
    assert ("p-eagle", k, 12) in runner.pool.engines


def test_automatic_k() -> None:
    jobs = some_jobs(3)
    metrics = native(jobs).run(CellKey("x", "p-eagle", "auto", 2), jobs, lambda: None).metrics()
    assert metrics.failed == 0
    assert metrics.k_steps


def test_a_prompt_that_does_not_fit_counts_as_failed() -> None:
    jobs = some_jobs(3)
    jobs[1] = replace(jobs[1], task=Task("long", ("w7 " * 300, "w8")))
    run = native(jobs).run(CellKey("x", "none", 0, 2), jobs, lambda: None)
    assert [record.task for record in run.failed] == ["long"]
    assert "context holds" in (run.failed[0].error or "")
    assert run.metrics().requests == 3


def test_engines_are_closed_to_stay_within_the_memory_budget() -> None:
    jobs = some_jobs(3)
    runner = native(jobs)
    runner.pool.budget_bytes = 1
    for method, k in (("none", 0), ("p-eagle", 2), ("none", 0)):
        runner.run(CellKey("x", method, k, 2), jobs, lambda: None)
        assert len(runner.pool.engines) == 1


def test_a_different_answer_is_reported_with_its_margin() -> None:
    jobs = some_jobs(4, turns=2)
    records = native(jobs).run(CellKey("x", "none", 0, 1), jobs, lambda: None).records
    margin = target_margin(tiny_pair(), jobs)
    assert check_answers(records, records, margin) == OutputCheck(8, 8)
    wrong = next(record for record in records if (record.task, record.turn) == ("2", 0))
    changed = replace(
        wrong, ids=[*wrong.ids[:4], (wrong.ids[4] + 1) % 90, *wrong.ids[5:]], text="other"
    )
    all_records = [changed if record is wrong else record for record in records]
    result = check_answers(all_records, records, margin)
    # The following turn has a different prompt and is not compared.
    assert (result.compared, result.identical) == (7, 6)
    [difference] = result.differences
    assert (difference.task, difference.turn, difference.position) == ("2", 0, 4)
    assert difference.margin is not None and difference.margin > 0
    shorter = replace(wrong, ids=wrong.ids[:4])
    [difference] = check_answers([shorter], records, margin).differences
    assert (difference.position, difference.margin) == (4, None)


def test_native_benchmarks_do_not_import_the_endpoint() -> None:
    """httpx may be missing on the machine that runs the engine."""
    code = (
        "import sys; from peagle.target.transformers_import import quick_imports\n"
        "with quick_imports():\n"
        " import peagle.cli, peagle.bench.load.native, peagle.bench.session, peagle.bench.tune\n"
        " import peagle.bench.quality.scoring\n"
        "assert 'peagle.bench.load.endpoint' not in sys.modules;"
        "assert 'peagle.data.fetch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy comes from the counter of the driver, in millijoules; a CPU has none."""
    assert EnergyMeter(torch.device("cpu")).joules() is None

    class Nvml:
        nvmlInit_v2 = staticmethod(lambda: 0)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid, handle: 0 if uuid == b"GPU-u" else 1)

        @staticmethod
        def nvmlDeviceGetTotalEnergyConsumption(handle: Any, used: Any) -> int:
            used._obj.value = 2500
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u")
    )
    assert EnergyMeter(torch.device("cuda")).joules() == 2.5

"""Load from several client processes: users are split evenly, and records are merged exactly."""

import os
import random
import signal
import threading
import time

import pytest

from peagle.bench.load.client_processes import (
    ClientRecords,
    deal_users,
    exit_reason,
    merge_records,
)
from peagle.bench.load.endpoint import EndpointRunner, cell_run
from peagle.errors import UserError
from peagle.results.key import CellKey
from peagle.results.request_record import RequestRecord
from tests.support.bench.benching import Server, serving, some_jobs
from tests.support.server.serving import make_backend, running


def runner(server: Server, clients: int = 2, warmup: int = 2) -> EndpointRunner:
    return EndpointRunner(server.url, None, "secret", 0.0, warmup, clients=clients)


def test_users_are_split_evenly() -> None:
    assert deal_users(7, 3) == [3, 2, 2]
    assert deal_users(2, 3) == [1, 1]
    assert deal_users(64, 4) == [16] * 4
    assert exit_reason(-9) == "was killed by SIGKILL"
    assert exit_reason(1) == "ended with exit code 1"


def recorded(count: int) -> list[RequestRecord]:
    """Requests with the timings of a load, some of them failed."""
    randomness = random.Random(0)
    records = []
    for number in range(count):
        start = number / 10
        gaps = [randomness.expovariate(20) for _ in range(randomness.randint(1, 9))]
        arrivals = [start + sum(gaps[: i + 1]) for i in range(len(gaps))]
        error = "HTTP 500" if number % 17 == 5 else None
        tokens = 2 * len(gaps)
        records.append(RequestRecord(str(number), 0, start, arrivals, tokens, error=error))
    return records


def test_merged_records_give_the_metrics_of_one_process() -> None:
    records = recorded(203)
    slow = [record for record in records if len(record.arrivals) > 6]
    fast = [record for record in records if len(record.arrivals) <= 6]
    merged = merge_records([ClientRecords(slow, 0), ClientRecords(fast, 0)])
    assert merged == records
    metrics = cell_run(merged, 0.0, None, None).metrics()
    assert metrics == cell_run(records, 0.0, None, None).metrics()
    parts = [cell_run(part, 0.0, None, None).metrics() for part in (slow, fast)]
    for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"):
        average = sum(getattr(part, name) for part in parts) / 2
        assert getattr(metrics, name) != pytest.approx(average, rel=1e-3), name


def test_a_real_server_gives_the_same_totals_to_one_and_to_two_processes() -> None:
    jobs = some_jobs(6, turns=2)
    runs = []
    with running(make_backend()) as (_, url):
        for clients in (1, 2):
            load = EndpointRunner(url, None, None, 0.0, 2, clients=clients)
            try:
                runs.append(load.run(CellKey("x", "endpoint", 0, 4), jobs, lambda: None))
            finally:
                load.close()
    one, two = (run.metrics() for run in runs)
    assert (one.requests, one.failed) == (two.requests, two.failed) == (12, 0)
    assert one.total_output_tokens == two.total_output_tokens == 12 * 12
    assert one.spec_decode_num_drafts == two.spec_decode_num_drafts
    assert one.spec_decode_accepted_tokens == two.spec_decode_accepted_tokens
    texts = [{(r.task, r.turn): r.text for r in run.records} for run in runs]
    assert texts[0] == texts[1]


def test_one_run_of_two_processes() -> None:
    jobs = some_jobs(7, turns=2)
    answered: list[int] = []
    first = (4, 5, 6, 21, 22, 23)  # requests of each run, after three warm-up requests
    with serving(wait=0.02, together=first) as server:
        load = runner(server)
        try:
            for _ in range(2):  # the processes serve every cell
                run = load.run(CellKey("x", "endpoint", 0, 3), jobs, lambda: answered.append(1))
        finally:
            load.close()
    assert not any(process.is_alive() for process in load.processes.processes)
    metrics = run.metrics()
    assert len(answered) == 2 * 14
    assert (metrics.requests, metrics.failed, metrics.total_output_tokens) == (14, 0, 84)
    assert server.max_concurrent == 3
    assert metrics.spec_decode_num_drafts == 42  # the warm-up's do not count
    assert sorted((r.task, r.turn) for r in run.records) == sorted(
        (job.task.id, turn) for job in jobs for turn in range(2)
    )
    starts = [record.start for record in run.records]
    assert starts == sorted(starts)
    assert max(starts[:3]) < min(record.arrivals[-1] for record in run.records), "one start"
    assert metrics.median_ttft_ms >= 20
    assert run.duration >= max(record.arrivals[-1] for record in run.records) - starts[0]
    assert server.requests[0]["authorization"] == "Bearer secret"


def test_more_clients_than_users() -> None:
    with serving(failure="no usage") as server:
        load = runner(server, clients=2, warmup=0)
        try:
            run = load.run(CellKey("x", "endpoint", 0, 1), some_jobs(3), lambda: None)
        finally:
            load.close()
    assert run.metrics().total_output_tokens == 9  # chunks
    assert load.uncounted_answers == 3
    assert server.max_concurrent == 1


def test_a_client_that_dies_is_reported() -> None:
    with serving(wait=0.2) as server:
        load = runner(server, warmup=0)

        def kill_when_busy() -> None:
            while server.max_concurrent < 2:
                time.sleep(0.01)
            os.kill(load.processes.processes[1].pid, signal.SIGKILL)

        threading.Thread(target=kill_when_busy, daemon=True).start()
        try:
            with pytest.raises(
                UserError, match=r"client 2 of 2 \(process \d+\) was killed by SIGK"
            ):
                load.run(CellKey("x", "endpoint", 0, 4), some_jobs(400), lambda: None)
        finally:
            load.close()
    assert not any(process.is_alive() for process in load.processes.processes)

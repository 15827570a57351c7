"""Workers behind a relay: supervision, kill -9, retries, back-off, drain; with pretended workers, real processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.errors import UserError
from peagle.server.workers.gateway import Gateway
from tests.support.relaying import ROOT, is_alive, make_gateway, pids_of, running_gateway, wait_for
from tests.support.serving import raw_request

Live = tuple[Gateway, str, Path]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    gateway = make_gateway(tmp_path, api_keys=("key",), max_body_mb=1 / 16)
    with running_gateway(gateway) as (_, url):
        yield gateway, url, tmp_path


def post(url: str, prompt: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {"authorization": "Bearer key", "x-request-id": f"id-{prompt.replace(' ', '-')}"}
    return httpx.post(url + path, json={"prompt": prompt} | body, headers=headers, timeout=60)


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_what_passes_and_what_is_ours(live: Live) -> None:
    gateway, url, folder = live
    told = post(url, "hello", seed=3).json()
    assert told["body"] == {"prompt": "hello", "seed": 3}
    assert [event["i"] for event in chunks(post(url, "hello", stream=True, max_tokens=9))] == list(
        range(9)
    )
    assert (folder / "fake-0.log").read_text().splitlines()[
        0
    ] == "/v1/completions hello id-hello None"
    bad = post(url, "bad")
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "BadRequestError"
    assert bad.headers["x-request-id"] == "id-bad"
    assert post(url, "x", model="fake").status_code == 200
    assert post(url, "x", model="other").status_code == 404
    for odd in ("w" * 513, 7, ["fake"], 0):
        assert post(url, "x", model=odd).status_code == 400
    assert post(url, "x" * (1 << 16)).status_code == 413
    assert post(url, "x", "/invocations").json()["body"]["prompt"] == "x"
    assert post(url, "x", "/tokenize").json()["body"]["prompt"] == "x"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401
    assert httpx.get(f"{url}/ping").status_code == 200
    models = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer key"}).json()
    assert models["data"][0] | {"created": 0} == {
        "id": "fake",
        "object": "model",
        "created": 0,
        "owned_by": "peagle",
        "parent": None,
        "root": "fake",
        "max_model_len": 77,
    }
    status = httpx.get(f"{url}/v1/peagle/status", headers={"authorization": "Bearer key"}).json()
    assert [worker["state"] for worker in status["workers"]] == ["ready", "ready"] and status[
        "restarts"
    ] == 0
    assert gateway.workers.in_flight == 0


def test_metrics_of_several_workers(live: Live) -> None:
    _, url, _ = live
    page = httpx.get(f"{url}/metrics").text
    lines = page.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) and "peagle:engine_up" in types
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    found = {
        (s.name, s.labels.get("engine")): s.value
        for f in text_string_to_metric_families(page)
        for s in f.samples
    }
    assert (
        found["vllm:generation_tokens_total", "0 fake-0"]
        == found["vllm:generation_tokens_total", "0 fake-1"]
        == 7
    )
    assert found["vllm:e2e_request_latency_seconds_sum", "0 fake-1"] == 4.5
    assert 'process_open_fds{worker="fake-0"} 9.0' in lines
    assert 'peagle:engine_up{model_name="fake"} 1.0' in lines and "peagle:worker_up" in page


def test_one_worker_keeps_its_names(tmp_path: Path) -> None:
    from tests.support.fake_worker import METRICS

    with running_gateway(make_gateway(tmp_path, 1)) as (_, url):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert set(METRICS.splitlines()) - {"# HELP peagle:engine_up Up."} <= set(lines)


def test_the_least_busy_worker_is_asked(live: Live) -> None:
    gateway, url, _ = live
    found: list[httpx.Response] = []
    how = {"stream": True, "max_tokens": 60}
    threads = [
        threading.Thread(target=lambda: found.append(post(url, "slow", **how))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: [worker.in_flight for worker in gateway.workers.all] == [2, 2])
    for thread in threads:
        thread.join()
    assert sorted(chunks(reply)[0]["worker"] for reply in found) == [
        "fake-0",
        "fake-0",
        "fake-1",
        "fake-1",
    ]


@pytest.mark.parametrize("trouble", ["die", "dead"])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_sent_is_asked_again_once(trouble: str, stream: bool, tmp_path: Path) -> None:
    """It kills the first worker and then the second: two tries, not three. Other requests never notice the first."""
    gateway = make_gateway(tmp_path, 3)
    with running_gateway(gateway) as (_, url):
        reply = post(url, trouble, stream=stream)
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2", reply.text
        assert httpx.get(f"{url}/health").status_code == 200
        assert post(url, "hello").json()["worker"] == "fake-2"
        wait_for(lambda: len(gateway.workers.ready) == 3)
        assert [worker.restarts for worker in gateway.workers.all] == [1, 1, 0]


@pytest.mark.parametrize("trouble", ["die@fake-0", "dead@fake-0"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_one_worker_lost_another_answers(trouble: str, stream: bool, live: Live) -> None:
    gateway, url, _ = live
    reply = post(url, trouble, stream=stream)
    assert reply.status_code == 200, reply.text
    assert (chunks(reply)[0] if stream else reply.json())["worker"] == "fake-1"
    wait_for(lambda: gateway.workers.restarts == 1 and len(gateway.workers.ready) == 2)


def test_half_an_answer_is_asked_for_again(tmp_path: Path) -> None:
    """Of another worker: this one is not yet known to be dying."""
    gateway = make_gateway(tmp_path)
    with running_gateway(gateway) as (_, url):
        assert post(url, "cut@fake-0").json()["worker"] == "fake-1"
        reply = post(url, "cut")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2", reply.text
        assert [(tmp_path / f"fake-{i}.log").read_text().count(" cut ") for i in range(2)] == [1, 1]
        *events, last = chunks(post(url, "cut", stream=True, max_tokens=4))
        assert [event["i"] for event in events] == [0, 1, 2] and last["error"]["code"] == 503
        assert gateway.workers.restarts == 0


def test_a_dead_workers_requests_go_to_another(live: Live) -> None:
    """Its process is stopped, so that the request has certainly come to it, and then killed."""
    gateway, url, folder = live
    first = pids_of(folder, "fake-0")[0]
    found: list[httpx.Response] = []
    os.kill(first, signal.SIGSTOP)
    thread = threading.Thread(target=lambda: found.append(post(url, "hello")))
    thread.start()
    wait_for(lambda: gateway.workers.all[0].in_flight == 1)
    os.kill(first, signal.SIGKILL)
    thread.join(timeout=30)
    assert found[0].status_code == 200 and found[0].json()["worker"] == "fake-1"


@pytest.mark.parametrize("trouble", ["mid", "half"])
def test_a_stream_under_way_is_told(trouble: str, live: Live) -> None:
    gateway, url, _ = live
    told = chunks(post(url, trouble, stream=True, max_tokens=9))
    assert [event.get("i") for event in told[:-1]] == [0, 1, 2]
    assert told[-1]["error"]["code"] == 503
    assert post(url, "hello").status_code == 200
    wait_for(lambda: len(gateway.workers.ready) == 2)
    assert gateway.workers.in_flight == 0


def test_kill_nine_with_one_worker(tmp_path: Path) -> None:
    gateway = make_gateway(
        tmp_path, 1, backoff=3.0
    )  # time enough to be told, however busy the machine is
    with running_gateway(gateway) as (_, url):
        before = pids_of(tmp_path, "fake-0")
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: not gateway.workers.ready)
        reply = post(url, "hello")
        assert reply.status_code == 503 and "started again" in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        wait_for(lambda: gateway.workers.ready)
        assert not any(is_alive(pid) for pid in before), "its child was left behind"
        assert post(url, "hello").json()["pid"] == pids_of(tmp_path, "fake-0")[0] != before[0]
        leash = gateway.workers.all[0].pid
        assert leash is not None
        os.kill(leash, signal.SIGKILL)
        wait_for(lambda: gateway.workers.all[0].restarts == 2 and gateway.workers.ready)
    assert not any(is_alive(pid) for pid in pids_of(tmp_path, "fake-0"))


def test_a_worker_that_stays_unwell_is_started_again(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, 1)
    with running_gateway(gateway):
        before = pids_of(tmp_path, "fake-0")
        (tmp_path / "sick-fake-0").touch()
        wait_for(lambda: not is_alive(before[0]))
        (tmp_path / "sick-fake-0").unlink()
        wait_for(lambda: gateway.workers.ready)
        assert gateway.workers.restarts == 1


def test_a_slow_worker_is_not_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that says 500 and then nothing for a while, the answer is passed on; nobody ends it."""
    gateway = make_gateway(tmp_path, 1)
    with running_gateway(gateway) as (_, url):
        worker = gateway.workers.all[0]
        get = worker.get
        monkeypatch.setattr(worker, "get", lambda path, seconds=0.3: get(path, seconds))
        slow = post(url, "stall")
        assert slow.status_code == 500 and "one bad request" in slow.text
        time.sleep(1.5)
        assert post(url, "hello").status_code == 200
        assert (worker.state, worker.restarts) == ("ready", 0)


def test_the_unhealthy_timeout_starts_when_a_worker_becomes_unhealthy(tmp_path: Path) -> None:
    """However long ago it was unhealthy before."""
    gateway = make_gateway(tmp_path, 1, unhealthy_timeout=30.0)
    with running_gateway(gateway):
        worker = gateway.workers.all[0]
        worker._unhealthy_since = time.monotonic() - 1000
        (tmp_path / "sick-fake-0").touch()
        wait_for(lambda: worker.state == "unwell")
        assert not worker._is_unresponsive()
        (tmp_path / "sick-fake-0").unlink()
        wait_for(lambda: gateway.workers.ready)
        assert worker.restarts == 0


def test_a_restart_that_hangs_is_tried_again(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, 1, restart_timeout=1.0)
    with running_gateway(gateway):
        (tmp_path / "sick-fake-0").touch()
        wait_for(lambda: gateway.workers.restarts >= 2)
        (tmp_path / "sick-fake-0").unlink()
        wait_for(lambda: gateway.workers.ready)


def test_malformed_answers_do_not_end_the_monitoring(tmp_path: Path) -> None:
    """The monitor logs the error and checks again."""
    odd = tmp_path / "odd-fake-0"
    odd.write_text("2")
    with running_gateway(make_gateway(tmp_path, 1)):
        assert odd.read_text() == "0"


def test_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    with pytest.raises(UserError, match="set TMPDIR"):
        make_gateway(tmp_path)


@pytest.mark.parametrize(("code", "tries"), [(2, 1), (1, 3)])
def test_a_first_start_that_fails_ends_the_server(code: int, tries: int, tmp_path: Path) -> None:
    (tmp_path / "crash-fake-0").write_text(str(code))
    gateway = make_gateway(tmp_path, 1, backoff=0.05)
    with running_gateway(gateway, ready=0) as (server, _):
        wait_for(lambda: server.failure)
        assert server.should_exit
        assert (
            f"exit code {code}" in server.failure
            and "out of memory, more or less" in server.failure
        )  # type: ignore[operator]
        assert gateway.workers.all[0].restarts == tries - 1


def test_later_deaths_are_tried_for_ever(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, 1, backoff=0.02)
    with running_gateway(gateway) as (server, _):
        (tmp_path / "crash-fake-0").write_text("2")
        os.kill(pids_of(tmp_path, "fake-0")[0], signal.SIGKILL)
        wait_for(lambda: gateway.workers.restarts >= 5)
        assert server.failure is None
        (tmp_path / "crash-fake-0").unlink()
        wait_for(lambda: gateway.workers.ready)


def head_of(body: bytes) -> str:
    return (
        "POST /v1/completions HTTP/1.1\nhost: x\nauthorization: Bearer key\n"
        f"content-type: application/json\ncontent-length: {len(body)}"
    )


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_not_answered_any_more(stream: bool, live: Live) -> None:
    gateway, url, folder = live
    body = json.dumps({"prompt": "slow", "stream": stream, "max_tokens": 2000}).encode()
    connection = raw_request(url, head_of(body), body)
    wait_for(
        lambda: (
            "slow" in (folder / "fake-0.log").read_text()
            if (folder / "fake-0.log").exists()
            else False
        )
    )
    connection.close()
    wait_for(lambda: "aborted slow" in (folder / "fake-0.log").read_text())
    wait_for(lambda: gateway.workers.in_flight == 0)


def test_who_does_not_read_holds_nobody_up(live: Live) -> None:
    """His worker waits with him: nothing piles up here."""
    gateway, url, folder = live
    body = json.dumps({"prompt": "long", "stream": True, "max_tokens": 1_000_000}).encode()
    stalled = raw_request(url, head_of(body), body)
    wait_for(lambda: gateway.workers.in_flight == 1)
    before = memory()
    time.sleep(1.5)
    assert post(url, "hello").status_code == 200 and gateway.workers.in_flight == 1
    assert memory() - before < 20 << 20
    stalled.close()
    wait_for(lambda: gateway.workers.in_flight == 0)
    wait_for(lambda: "aborted long" in (folder / "fake-0.log").read_text())


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_full_house(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, 1, max_batch=1, max_queue=1, timeout=4.0)
    with running_gateway(gateway) as (_, url):
        found: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: found.append(post(url, "slow"))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: gateway.workers.in_flight == 2)
        full = post(url, "hello")
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert (
            'peagle:requests_total{model_name="fake",status="429"} 1.0'
            in httpx.get(f"{url}/metrics").text
        )
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in found] == [504, 504]
        late = chunks(post(url, "slow", stream=True, max_tokens=500))
        assert late[-1]["error"]["code"] == 504


@pytest.mark.parametrize("patience", [5.0, 0.2])
def test_drain(patience: float, tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, 2, drain_seconds=patience)
    found: list[httpx.Response] = []
    with running_gateway(gateway) as (server, url):
        thread = threading.Thread(
            target=lambda: found.append(post(url, "slow", stream=True, max_tokens=40))
        )
        thread.start()
        wait_for(lambda: gateway.workers.in_flight == 1)
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: gateway.drain.is_draining)
        thread.join(timeout=30)
        wait_for(lambda: server.should_exit)
    told = chunks(found[0])
    assert len(told) == 40 if patience == 5 else told[-1]["error"]["code"] == 503
    assert not any(
        is_alive(pid) for name in ("fake-0", "fake-1") for pid in pids_of(tmp_path, name)
    )


def test_nobody_waits_for_what_is_still_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = make_gateway(tmp_path, 1)
    monkeypatch.setattr(gateway.kind, "launch_specs", lambda folder: time.sleep(600))
    with running_gateway(gateway, ready=0) as (server, url):
        assert httpx.get(f"{url}/health").status_code == 503 and post(url, "x").status_code == 503
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.should_exit)
    # `running_gateway` asserts that the server's thread ends


ORPHANS = """
import sys, time
from pathlib import Path
from tests.support.relaying import make_gateway, running_gateway
with running_gateway(make_gateway(Path(sys.argv[1]))):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_when_the_server_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    here = tempfile.mkdtemp()  # a short path: sockets lie there
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "TMPDIR": here}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    pids = [pid for name in ("fake-0", "fake-1") for pid in pids_of(tmp_path, name)]
    assert all(map(is_alive, pids)) and list(Path(here).glob("peagle-*/*.sock"))
    server.kill()
    server.communicate()
    wait_for(lambda: not any(map(is_alive, pids)), 10)
    wait_for(lambda: not list(Path(here).iterdir()), 10)
    Path(here).rmdir()

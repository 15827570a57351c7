"""vLLM behind a gateway: monitoring, SIGKILL, backoff, drain; with a fake vLLM."""

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

from peagle.errors import UserError
from peagle.server.vllm.gateway import Gateway
from tests.support.server.relaying import (
    ROOT,
    fake_pids,
    is_alive,
    is_ready,
    make_gateway,
    running_gateway,
)
from tests.support.server.serving import raw_request
from tests.support.waiting import wait_for

Live = tuple[Gateway, str, Path]


@pytest.fixture
def live_gateway(tmp_path: Path) -> Iterator[Live]:
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


def test_requests_are_checked_and_relayed(live_gateway: Live) -> None:
    gateway, url, folder = live_gateway
    body = post(url, "hello", seed=3).json()["body"]
    assert body.pop("cache_salt") and body == {"prompt": "hello", "seed": 3}
    events = chunks(post(url, "hello", stream=True, max_tokens=9))
    assert [event["i"] for event in events] == list(range(9))
    log = (folder / "log").read_text()
    assert log.splitlines()[0] == "/v1/completions hello id-hello None"
    bad = post(url, "bad")
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "BadRequestError"
    assert bad.headers["x-request-id"] == "id-bad"
    assert post(url, "x", model="fake").status_code == 200
    assert post(url, "x", model="other").status_code == 404
    for model in ("w" * 513, 7, ["fake"], 0):
        assert post(url, "x", model=model).status_code == 400
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    relayed = post(url, "x", "/v1/chat/completions", messages=[], **tools).json()["body"]
    assert tools.items() <= relayed.items()  # vLLM parses tool calls itself.
    assert post(url, "x" * (1 << 16)).status_code == 413
    assert post(url, "x", "/invocations").json()["body"]["prompt"] == "x"
    assert post(url, "x", "/tokenize").json()["body"]["prompt"] == "x"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 401
    assert httpx.get(f"{url}/ping", timeout=60).status_code == 200
    models = httpx.get(
        f"{url}/v1/models", headers={"authorization": "Bearer key"}, timeout=60
    ).json()
    assert models["data"][0] | {"created": 0} == {
        "id": "fake",
        "object": "model",
        "created": 0,
        "owned_by": "peagle",
        "parent": None,
        "root": "fake",
        "max_model_len": 77,
    }
    status = httpx.get(
        f"{url}/v1/peagle/status", headers={"authorization": "Bearer key"}, timeout=60
    ).json()
    assert [worker["state"] for worker in status["workers"]] == ["ready"]
    assert status["restarts"] == 0
    assert gateway.in_flight == 0


def test_responses_and_messages_are_relayed(live_gateway: Live) -> None:
    """Streams of these APIs end with their own events, even if vLLM dies."""
    _, url, _ = live_gateway
    body = post(url, "x", "/v1/responses", input="hi", tools=[]).json()["body"]
    assert body.pop("cache_salt") and body == {"prompt": "x", "input": "hi", "tools": []}
    body = post(url, "x", "/v1/messages", max_tokens=3).json()["body"]
    assert body == {"prompt": "x", "max_tokens": 3}  # vLLM does not support a cache salt there.
    assert post(url, "x", "/v1/messages/count_tokens").json()["body"] == {"prompt": "x"}
    for path, last in (("/v1/messages", "message_stop"), ("/v1/responses", "response.completed")):
        reply = post(url, "hello", path, stream=True)
        assert reply.text.endswith(f'event: {last}\ndata: {{"type": "{last}"}}\n\n')
    reply = httpx.get(f"{url}/v1/responses/resp_1", headers={"x-api-key": "key"}, timeout=60)
    assert reply.status_code == 404 and "vllm" in reply.json()["error"]["message"]
    refused = post(url, "x", "/v1/messages", model="other")
    assert refused.status_code == 404 and refused.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_relayed_stream_that_breaks_ends_with_an_error_event(
    live_gateway: Live, path: str
) -> None:
    _, url, _ = live_gateway
    reply = post(url, "mid", path, stream=True, max_tokens=9)
    name, data = reply.text.removesuffix("\n\n").rpartition("\n\n")[2].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and error["type"] == "error"
    message = error["error"]["message"] if path == "/v1/messages" else error["message"]
    assert "the engine stopped" in message


def test_vllm_gets_a_salt_instead_of_the_key(tmp_path: Path) -> None:
    """The salt depends on the key and on `cache_salt` of a request; without both there is none."""

    def salt(url: str, key: str | None, **body: Any) -> str | None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        reply = httpx.post(
            f"{url}/v1/completions", json={"prompt": "x"} | body, headers=headers, timeout=60
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["body"].get("cache_salt")  # type: ignore[no-any-return]

    with running_gateway(make_gateway(tmp_path, api_keys=("one", "two"))) as (_, url):
        salts = [
            salt(url, key, **body) for key in ("one", "two") for body in ({}, {"cache_salt": "a"})
        ]
        assert len(set(salts)) == 4 and None not in salts
        assert salts[1] == salt(url, "one", cache_salt="a") != "a"
        assert not any(key in str(salts) for key in ("one", "two"))
        for wrong in ("", 7, ["a"], "a" * 513):
            reply = post_with(url, "one", cache_salt=wrong)
            assert reply.status_code == 400 and "cache_salt" in reply.json()["error"]["message"]
    with running_gateway(make_gateway(tmp_path)) as (_, url):
        assert salt(url, None) is None
        assert salt(url, None, cache_salt="a") not in (None, "a", salts[1])


def post_with(url: str, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": "x"} | body, headers=headers, timeout=60
    )


def test_metrics_include_those_of_vllm_and_the_gateway(live_gateway: Live) -> None:
    from tests.support.server.failing_vllm import METRICS

    _, url, _ = live_gateway
    post(url, "hello")
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    assert set(METRICS.splitlines()) <= set(lines)
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for line in (
        'peagle:engine_up{model_name="fake"} 1.0',
        'peagle:engine_restarts_total{model_name="fake"} 0.0',
        'peagle:worker_up{model_name="fake",worker="vllm"} 1.0',
        'peagle:worker_requests{model_name="fake",worker="vllm"} 0.0',
        'peagle:requests_total{model_name="fake",status="200"} 1.0',
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("trouble", "stream"),
    [
        ("die", False),
        pytest.param("dead", True, marks=pytest.mark.slow),
        pytest.param("die", True, marks=pytest.mark.slow),
        pytest.param("dead", False, marks=pytest.mark.slow),
    ],
)
def test_a_request_that_kills_vllm_gets_an_error(
    trouble: str, stream: bool, tmp_path: Path
) -> None:
    """No requests are sent to a dead vLLM until it is restarted."""
    gateway = make_gateway(tmp_path)
    with running_gateway(gateway) as (_, url):
        (tmp_path / "crash").write_text("1")  # No vLLM is ready until the end of the checks.
        reply = post(url, trouble, stream=stream)
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2", reply.text
        assert "the engine stopped during the answer" in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 503
        assert "started again" in post(url, "hello").json()["error"]["message"]
        assert (
            'peagle:engine_up{model_name="fake"} 0.0'
            in httpx.get(f"{url}/metrics", timeout=60).text
        )
        (tmp_path / "crash").unlink()
        wait_for(lambda: is_ready(gateway))
        assert gateway.process.restarts >= 1 and gateway.in_flight == 0
        assert post(url, "hello").status_code == 200


def test_an_aborted_answer_is_an_error(tmp_path: Path) -> None:
    """vLLM aborts its answers with status 200 before the gateway detects the failure."""
    gateway = make_gateway(tmp_path)
    with running_gateway(gateway) as (_, url):
        reply = post(url, "cut")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2", reply.text
        *events, last = chunks(post(url, "cut", stream=True, max_tokens=4))
        assert [event["i"] for event in events] == [0, 1, 2] and last["error"]["code"] == 503
        assert gateway.process.restarts == 0


def test_waiting_requests_get_an_error_if_vllm_is_killed(live_gateway: Live) -> None:
    """The process is stopped after it received the request, and then killed."""
    gateway, url, folder = live_gateway
    pid = fake_pids(folder)[0]
    replies: list[httpx.Response] = []
    os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(target=lambda: replies.append(post(url, "hello")))
    thread.start()
    wait_for(lambda: gateway.in_flight == 1)
    os.kill(pid, signal.SIGKILL)
    thread.join(timeout=60)
    assert replies[0].status_code == 503 and replies[0].headers["retry-after"] == "2"


@pytest.mark.parametrize("trouble", ["mid", "half"])
def test_a_running_stream_gets_an_error_event(trouble: str, live_gateway: Live) -> None:
    gateway, url, _ = live_gateway
    *events, last = chunks(post(url, trouble, stream=True, max_tokens=9))
    assert [event.get("i") for event in events] == [0, 1, 2]
    assert last["error"]["code"] == 503
    wait_for(lambda: gateway.process.restarts == 1 and is_ready(gateway))
    assert post(url, "hello").status_code == 200 and gateway.in_flight == 0


@pytest.mark.slow
def test_vllm_is_restarted_after_sigkill(tmp_path: Path) -> None:
    # The backoff is long enough for the requests below on a busy machine.
    gateway = make_gateway(tmp_path, backoff=3.0)
    with running_gateway(gateway) as (_, url):
        before = fake_pids(tmp_path)
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: not is_ready(gateway))
        reply = post(url, "hello")
        assert reply.status_code == 503 and "started again" in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 503
        wait_for(lambda: is_ready(gateway))
        assert not any(is_alive(pid) for pid in before), "a child process of vLLM remains"
        assert post(url, "hello").json()["pid"] == fake_pids(tmp_path)[0] != before[0]
        guard = gateway.process.pid
        assert guard is not None
        os.kill(guard, signal.SIGKILL)
        wait_for(lambda: gateway.process.restarts == 2 and is_ready(gateway))
    assert not any(is_alive(pid) for pid in fake_pids(tmp_path))


def test_a_vllm_that_stays_unhealthy_is_restarted(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    with running_gateway(gateway):
        before = fake_pids(tmp_path)
        (tmp_path / "sick").touch()
        wait_for(lambda: not is_alive(before[0]))
        (tmp_path / "sick").unlink()
        wait_for(lambda: is_ready(gateway))
        assert gateway.process.restarts == 1


@pytest.mark.slow
def test_a_slow_vllm_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM answers 500 and is then silent for a while: the answer is relayed."""
    gateway = make_gateway(tmp_path)
    with running_gateway(gateway) as (_, url):
        process = gateway.process
        get = process.get
        monkeypatch.setattr(process, "get", lambda path, seconds=0.3: get(path, seconds))
        slow = post(url, "stall")
        assert slow.status_code == 500 and "one bad request" in slow.text
        time.sleep(1.5)
        assert post(url, "hello").status_code == 200
        assert (process.state, process.restarts) == ("ready", 0)


def test_the_unhealthy_timeout_starts_when_vllm_becomes_unhealthy(tmp_path: Path) -> None:
    """Earlier unhealthy periods do not count."""
    gateway = make_gateway(tmp_path, unhealthy_timeout=30.0)
    with running_gateway(gateway):
        process = gateway.process
        process._unhealthy_since = time.monotonic() - 1000
        (tmp_path / "sick").touch()
        wait_for(lambda: process.state == "unwell")
        assert not process.replacement_reason()
        (tmp_path / "sick").unlink()
        wait_for(lambda: is_ready(gateway))
        assert process.restarts == 0


@pytest.mark.slow
def test_a_restart_that_hangs_is_repeated(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, restart_timeout=3.0)
    with running_gateway(gateway):
        (tmp_path / "sick").touch()
        wait_for(lambda: gateway.process.restarts >= 2)
        gateway.process.restart_timeout = 120.0  # a long limit from here on, for a busy machine
        (tmp_path / "sick").unlink()
        wait_for(lambda: is_ready(gateway))


def test_malformed_answers_do_not_end_the_monitoring(tmp_path: Path) -> None:
    """The monitor logs the error and checks again."""
    odd = tmp_path / "odd"
    odd.write_text("2")
    with running_gateway(make_gateway(tmp_path)):
        assert odd.read_text() == "0"


def test_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    with pytest.raises(UserError, match="set TMPDIR"):
        make_gateway(tmp_path)


@pytest.mark.parametrize(("code", "tries"), [(2, 1), (1, 3)])
def test_a_first_start_that_fails_ends_the_server(code: int, tries: int, tmp_path: Path) -> None:
    (tmp_path / "crash").write_text(str(code))
    gateway = make_gateway(tmp_path, backoff=0.05)
    with running_gateway(gateway, ready=False) as (server, _):
        wait_for(lambda: server.should_exit)
        assert f"exit code {code}" in str(server.failure)
        assert "out of memory, more or less" in str(server.failure)
        assert gateway.process.restarts == tries - 1


def test_a_vllm_that_was_ready_is_restarted_without_limit(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, backoff=0.02)
    with running_gateway(gateway) as (server, _):
        (tmp_path / "crash").write_text("2")
        os.kill(fake_pids(tmp_path)[0], signal.SIGKILL)
        wait_for(lambda: gateway.process.restarts >= 5)
        assert server.failure is None
        (tmp_path / "crash").unlink()
        wait_for(lambda: is_ready(gateway))


def read_head(body: bytes) -> str:
    return (
        "POST /v1/completions HTTP/1.1\nhost: x\nauthorization: Bearer key\n"
        f"content-type: application/json\ncontent-length: {len(body)}"
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request_of_vllm(stream: bool, live_gateway: Live) -> None:
    gateway, url, folder = live_gateway
    body = json.dumps({"prompt": "slow", "stream": stream, "max_tokens": 2000}).encode()
    connection = raw_request(url, read_head(body), body)
    log = folder / "log"
    wait_for(lambda: log.exists() and "slow" in log.read_text())
    connection.close()
    wait_for(lambda: "aborted slow" in log.read_text())
    wait_for(lambda: gateway.in_flight == 0)


def test_a_client_that_does_not_read_delays_no_other(live_gateway: Live) -> None:
    """The gateway does not buffer, so vLLM waits as well."""
    gateway, url, folder = live_gateway
    body = json.dumps({"prompt": "long", "stream": True, "max_tokens": 1_000_000}).encode()
    stalled = raw_request(url, read_head(body), body)
    wait_for(lambda: gateway.in_flight == 1)
    before = memory()
    time.sleep(1.5)
    assert post(url, "hello").status_code == 200 and gateway.in_flight == 1
    assert memory() - before < 20 << 20
    stalled.close()
    wait_for(lambda: gateway.in_flight == 0)
    wait_for(lambda: "aborted long" in (folder / "log").read_text())


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_too_many_requests(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, max_batch=1, max_queue=1, timeout=4.0)
    with running_gateway(gateway) as (_, url):
        replies: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: replies.append(post(url, "slow"))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: gateway.in_flight == 2)
        full = post(url, "hello")
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert (
            'peagle:requests_total{model_name="fake",status="429"} 1.0'
            in httpx.get(f"{url}/metrics", timeout=60).text
        )
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in replies] == [504, 504]
        late = chunks(post(url, "slow", stream=True, max_tokens=500))
        assert late[-1]["error"]["code"] == 504


@pytest.mark.parametrize(("drain_seconds", "tokens"), [(60.0, 40), (0.2, 4000)])
def test_drain_finishes_answers(drain_seconds: float, tokens: int, tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, drain_seconds=drain_seconds)
    body = {"prompt": "slow", "stream": True, "max_tokens": tokens}
    lines: list[str] = []

    def read_answer(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                lines.append(line.removeprefix("data: "))

    with running_gateway(gateway) as (server, url):
        thread = threading.Thread(target=read_answer, args=(url,))
        thread.start()
        wait_for(lambda: lines)  # The answer begins before the exit.
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: gateway.drain.is_draining)
        thread.join(timeout=60)
        wait_for(lambda: server.should_exit)
    *events, end = [line for line in lines if line]
    assert end == "[DONE]"
    assert (
        len(events) == 40 if drain_seconds == 60 else json.loads(events[-1])["error"]["code"] == 503
    )
    assert not any(is_alive(pid) for pid in fake_pids(tmp_path))


def test_the_server_can_exit_while_vllm_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = make_gateway(tmp_path)
    monkeypatch.setattr(gateway.process, "_prepare", lambda socket: time.sleep(600))
    with running_gateway(gateway, ready=False) as (server, url):
        assert (
            httpx.get(f"{url}/health", timeout=60).status_code == 503
            and post(url, "x").status_code == 503
        )
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.should_exit)
    # `running_gateway` asserts that the server's thread ends


ORPHANS = """
import sys, time
from pathlib import Path
from tests.support.server.relaying import make_gateway, running_gateway
with running_gateway(make_gateway(Path(sys.argv[1]))):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_no_process_remains_after_the_server_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    root = Path(tempfile.mkdtemp())  # a short path, for the sockets
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "TMPDIR": str(root)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    pids = fake_pids(tmp_path)
    assert all(map(is_alive, pids)) and list(root.glob("peagle-*/*.sock"))
    server.kill()
    server.communicate()
    wait_for(lambda: not any(map(is_alive, pids)))
    wait_for(lambda: not list(root.iterdir()))
    root.rmdir()

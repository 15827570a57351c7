"""A real server on loopback: the openai client, misbehaving clients, many at once, signals."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.drain import Drain
from peagle.server.http.request_log import RequestLog
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.web_server import Server
from tests.support.api import clients
from tests.support.server.serving import (
    HELLO,
    all_idle,
    client_of,
    events,
    make_backend,
    paused,
    raw_request,
    read_reply,
    running,
    slowed,
    tiny_folder,
    until,
)
from tests.support.server.thread_engines import ThreadEngines
from tests.support.waiting import wait_for

LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[EngineBackend, str]]:
    front = make_backend(max_batch=64, kv_tokens=16384, api_keys=("key",))
    with running(front) as (_, url):
        yield front, url


def wait_free(front: EngineBackend) -> None:
    asyncio.run(until(lambda: all_idle(front)))


def test_openai_client(live: tuple[EngineBackend, str]) -> None:
    front, url = live
    client = clients.openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    body: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2, n=2)
    assert whole.choices[1].message.content == whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == 8 and whole.usage.completion_tokens == 16
    assert whole.metrics["speculative_decoding"]["num_spec_steps"] > 0
    chunks = list(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage.completion_tokens == 8
    done = client.completions.create(
        model="tiny", prompt="w6", max_tokens=4, echo=True, logprobs=1, temperature=0
    )
    assert len(done.choices[0].logprobs.tokens) == 5
    wait_free(front)


def test_openai_client_errors(live: tuple[EngineBackend, str]) -> None:
    front, url = live
    client = clients.openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
    with pytest.raises(clients.openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(clients.openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(clients.openai.AuthenticationError):
        clients.openai.OpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0).models.list()
    with pytest.raises(clients.openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt="w6 " * 400)
    wait_free(front)


def test_openai_async_client(live: tuple[EngineBackend, str]) -> None:
    front, url = live

    async def main() -> None:
        client = clients.openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)

        async def ask(i: int) -> str:
            body: Any = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"w{i + 6}"}],
                "seed": i,
            }
            stream = await client.chat.completions.create(**body, max_tokens=20, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        first = await asyncio.gather(*(ask(i) for i in range(8)))
        assert first == await asyncio.gather(*(ask(i) for i in range(8)))
        await client.close()

    asyncio.run(main())
    wait_free(front)


def test_fifty_streams_at_once(live: tuple[EngineBackend, str]) -> None:
    front, url = live

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": "Bearer key"}
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=120, limits=limits
        ) as client:

            async def ask(i: int) -> int:
                body = {
                    "prompt": f"w{6 + i % 40} w9",
                    "max_tokens": 30 + i,
                    "ignore_eos": True,
                    "stream": True,
                }
                reply = await client.post(
                    "/v1/completions", json=body | {"stream_options": {"include_usage": True}}
                )
                return int(events(reply.text)[-1]["usage"]["completion_tokens"])

            assert await asyncio.gather(*(ask(i) for i in range(50))) == [30 + i for i in range(50)]

    asyncio.run(main())
    wait_free(front)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnects_end_requests(live: tuple[EngineBackend, str], stream: bool) -> None:
    front, url = live
    assert front.engines.main is not None
    engine = front.engines.main.engine
    before = engine.status()["finished"].get("abort", 0)
    body = json.dumps(LONG | {"stream": stream, "n": 4}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\nhost: x\nauthorization: Bearer key\n"
        f"content-type: application/json\ncontent-length: {len(body)}"
    )
    with slowed(front, 0.3):
        connections = [raw_request(url, head, body) for _ in range(5)]
        wait_for(lambda: len(engine.loop.scheduler.live) == 20)
        for connection in connections:
            connection.close()
        wait_free(front)
    assert engine.status()["finished"]["abort"] - before == 20
    wait_for(lambda: not front.drain.open_requests)


@pytest.fixture
def disconnect_early() -> Iterator[tuple[EngineBackend, str]]:
    front = make_backend(api_keys=("key",), max_body_mb=1, body_timeout=1.0)
    with running(front) as (server, url):
        server.connections.wait_seconds = 60.0  # Only bodies have a short time limit.
        yield front, url


def test_incomplete_and_malformed_requests(disconnect_early: tuple[EngineBackend, str]) -> None:
    front, url = disconnect_early
    head = (
        "POST /v1/completions HTTP/1.1\nhost: x\nauthorization: Bearer key\n"
        "content-type: application/json\ncontent-length: 100"
    )
    slow = raw_request(url, head, b'{"prompt"')
    assert read_reply(slow)[0] == 408
    slow.close()
    raw_request(url, head, b'{"prompt"').close()
    long = raw_request(url, head.replace("100", str(100 << 20)), b"{")
    assert read_reply(long)[0] == 413
    long.close()
    malformed = raw_request(url, "POST /v1/completions HTTP/9.9 what")
    assert read_reply(malformed)[0] == 400
    malformed.close()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    wait_free(front)


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_the_size_of_headers_is_limited(http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if http == "h11":
        monkeypatch.setattr("peagle.server.http.header_limit.find_spec", lambda name: None)
    with running(make_backend(api_keys=("key",))) as (_, url):
        for flood in (b"a" * (1 << 17), b"a: b\r\n" * (1 << 15)):
            # The first request is complete; the headers of the second never end.
            endless = raw_request(url, "GET /health HTTP/1.1\nhost: 127.0.0.1\nx-a: a")
            assert read_reply(endless)[0] == 200
            endless.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: " + flood)
            assert read_reply(endless)[0] == (431 if http == "httptools" else 400)
            assert until_closed(endless)
        chunked = "POST /health HTTP/1.1\nhost: 127.0.0.1\ntransfer-encoding: chunked"
        trailing = raw_request(url, chunked, b"1\r\na\r\n0\r\nx-a: " + b"a" * (1 << 19))
        assert until_closed(trailing)
        long = httpx.get(f"{url}/health", headers={"x-a": "a" * 60_000}, timeout=60)
        assert long.status_code == 200
        body = httpx.post(
            f"{url}/v1/completions",
            content=b" " * (1 << 20),
            headers={"authorization": "Bearer key"},
        )
        assert body.status_code == 400  # a long body does not count as a header


def until_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    connection.close()
    return True


def test_a_client_that_does_not_read_delays_no_other() -> None:
    """The KV pages of its request are freed when the answer is complete."""
    front = make_backend(max_batch=4)
    with running(front) as (_, url):
        body = json.dumps(LONG | {"stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\nhost: 127.0.0.1\ncontent-type: application/json\n"
        head += f"content-length: {len(body)}"
        stalled = raw_request(url, head, body)
        reply = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 200
        wait_free(front)
        stalled.close()


def asking(url: str, stream: bool, replies: dict[bool, httpx.Response]) -> threading.Thread:
    def ask() -> None:
        replies[stream] = httpx.post(
            f"{url}/v1/completions", json=LONG | {"stream": stream}, timeout=60
        )

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def drain(server: Server, front: EngineBackend, requests: int) -> None:
    """Send SIGTERM when this number of requests is in flight."""
    wait_for(lambda: len(front.drain.in_flight) >= requests)
    server.handle_exit(signal.SIGTERM, None)
    wait_for(lambda: front.drain.is_draining)


def wait_exit(server: Server) -> None:
    wait_for(lambda: server.should_exit)


def test_drain_lets_answers_finish() -> None:
    front, replies = make_backend(drain_seconds=30), dict[bool, httpx.Response]()
    with running(front) as (server, url):
        with paused(front):
            threads = [asking(url, stream, replies) for stream in (True, False)]
            drain(server, front, 2)
            for path in ("/health", "/ping"):
                assert httpx.get(f"{url}{path}", timeout=60).status_code == 503
            refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
        for thread in threads:
            thread.join(timeout=60)
        assert events(replies[True].text)[-1]["choices"][0]["finish_reason"] == "length"
        assert replies[False].json()["usage"]["completion_tokens"] == 200
        wait_exit(server)


def test_drain_ends_requests_that_take_too_long() -> None:
    front, replies = make_backend(drain_seconds=0.2), dict[bool, httpx.Response]()
    with running(front) as (server, url), slowed(front, 0.3):
        threads = [asking(url, stream, replies) for stream in (True, False)]
        engine = front.engines.pool.connections["engine"]
        wait_for(lambda: sum(r.has_tokens for r in list(engine.requests.values())) == 2)
        drain(server, front, 2)
        for thread in threads:
            thread.join(timeout=60)
        assert events(replies[True].text)[-1]["error"]["code"] == 503
        assert (
            replies[False].status_code == 503
            and "shut down" in replies[False].json()["error"]["message"]
        )
        wait_exit(server)


def test_a_second_signal_ends_answers_at_once(caplog: pytest.LogCaptureFixture) -> None:
    front, replies = make_backend(drain_seconds=3600), dict[bool, httpx.Response]()
    logged = caplog.at_level(logging.INFO, "peagle.server")
    with logged, running(front) as (server, url), slowed(front, 0.3):
        threads = [asking(url, stream, replies) for stream in (True, False)]
        engine = front.engines.pool.connections["engine"]
        wait_for(lambda: sum(r.has_tokens for r in list(engine.requests.values())) == 2)
        drain(server, front, 2)
        server.handle_exit(signal.SIGINT, None)
        for thread in threads:
            thread.join(timeout=60)
        wait_exit(server)
    assert events(replies[True].text)[-1]["error"]["code"] == 503
    assert replies[False].status_code == 503
    fields = {record.getMessage(): record.__dict__.get("fields") for record in caplog.records}
    assert fields["draining"]["second_signal"] == "stops at once"
    assert "stopped" in fields
    assert not [record for record in caplog.records if record.exc_info]


def test_requests_canceled_by_the_shutdown_are_not_logged_as_errors() -> None:
    """uvicorn logs a traceback for every exception of its application, including cancellation."""
    sent: list[Message] = []

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    async def send(message: Message) -> None:
        sent.append(message)

    async def canceled(is_draining: bool) -> None:
        drain = Drain(0)
        drain.is_draining = is_draining
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        app = RequestLog(respond, drain, ResponseCounts("tiny"))
        task = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(canceled(is_draining=True))
    assert sent[0]["status"] == 503 and b"shut down" in sent[1]["body"]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(canceled(is_draining=False))


def test_drain_ends_requests_that_no_engine_has_accepted() -> None:
    """Requests and calls that arrive during a long step get 503 as well."""
    backend = make_backend(drain_seconds=0)
    engines = backend.engines
    assert isinstance(engines, ThreadEngines)
    step = threading.Event()
    bodies: list[dict[str, Any]] = [LONG, LONG | {"echo": True, "logprobs": 1}]

    async def main() -> None:
        async with client_of(backend) as client:
            engines.engine_pool.driver.submit(step.wait)
            try:
                posts = [client.post("/v1/completions", json=body) for body in bodies]
                waiting = [asyncio.create_task(post) for post in posts]
                connection = engines.pool.connections["engine"]
                await until(lambda: connection.requests and connection._calls)
                backend.drain.begin(lambda: None)
                replies = await asyncio.wait_for(asyncio.gather(*waiting), 60)
            finally:
                step.set()
            for reply in replies:
                assert reply.status_code == 503, reply.text
                assert "shut down" in reply.json()["error"]["message"]

    asyncio.run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def start(
    folder: Path, *args: str, **environment: str
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start `peagle serve`; return the process and the first line of its log."""
    command = [sys.executable, "-m", "peagle", "serve", *args]
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SM_VLLM_")
    }
    process = subprocess.Popen(
        command, env=inherited | environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    return process, json.loads(process.stderr.readline())


@pytest.mark.slow  # tests/deploy/test_sagemaker_container.py covers this, too.
def test_the_process_from_start_to_end(folder: Path) -> None:
    config = json.dumps(
        {"model": str(folder / "p-eagle"), "num_speculative_tokens": 2, "parallel_drafting": True}
    )
    environment = {
        "SM_VLLM_MODEL": str(folder / "target"),
        "SM_VLLM_SPECULATIVE_CONFIG": config,
        "SM_VLLM_DTYPE": "float32",
        "SM_VLLM_HOST": "127.0.0.1",
        "SM_VLLM_SERVED_MODEL_NAME": "tiny",
    }
    process, first = start(folder, "--port", "0", **environment)
    try:
        assert first["event"] == "listening"
        url = f"http://127.0.0.1:{first['port']}"
        states: list[int] = []
        end = time.monotonic() + 120
        while time.monotonic() < end and (not states or states[-1] != 200):
            states.append(httpx.get(f"{url}/ping", timeout=60).status_code)
            time.sleep(0.05)
        assert states[0] == 503 and states[-1] == 200
        reply = httpx.post(
            f"{url}/invocations", json={"messages": HELLO, "max_tokens": 5}, timeout=60
        ).json()
        assert (
            reply["model"] == "tiny"
            and reply["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        _, rest = process.communicate()
    logged = [json.loads(line)["event"] for line in rest.splitlines()]
    assert "ready" in logged and "draining" in logged and "stopped" in logged


def test_sigterm_while_loading(folder: Path) -> None:
    process, first = start(folder, str(folder / "target"), "--port", "0", "--method", "none")
    assert first["event"] == "listening"
    health = httpx.get(f"http://127.0.0.1:{first['port']}/health", timeout=180)
    assert health.status_code in (
        503,
        200,
    )  # On a busy machine, the server may be ready before the test polls it.
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=180)
    assert process.returncode == 0 and "Traceback" not in rest and "terminate" not in rest


def test_a_pair_that_cannot_be_served_ends_the_process(folder: Path) -> None:
    """This fault is only found when the drafter is read; others are refused before the start."""
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    args = ("--port", "0", "--drafter", str(broken))
    process, first = start(folder, str(folder / "target"), *args)
    assert first["event"] == "listening"
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 2 and "is not valid JSON" in rest and "Traceback" not in rest

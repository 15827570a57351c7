"""The engine in a separate process: the same answers, and recovery after failures of a side."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.server.engine_process import engine_supervisor
from peagle.server.engine_process.engine_link import EngineLink
from peagle.server.engine_process.engine_set import EngineSet
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.front.add_message import add_message
from peagle.server.front.engine_client import EngineClient
from peagle.server.front.engine_connection import EngineConnection
from peagle.server.front.generation_params import GenerationParams
from peagle.server.http.errors import ApiError
from peagle.server.openai import answer as answer_module
from peagle.server.openai.answer import Answer
from peagle.server.openai.choice import Choice
from peagle.server.routes import create_engine_backend
from peagle.server.worker.engine_worker import EngineWorker
from tests.support.server.controlled_process import CONTROL_VARIABLE
from tests.support.server.live_server import live_server
from tests.support.server.serving import (
    CHAT,
    HELLO,
    SETTINGS,
    TEXT,
    ask,
    client_of,
    events,
    served,
    tiny_folder,
    tiny_pair,
    until,
)

CONTROLLED = "tests.support.server.controlled_process"
LONG: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True}
CASES: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 1.0, "seed": 5},
    {"stop": ["w50 w50"]},
    {"stop": ["w50 w50"], "include_stop_str_in_output": True},
    {"stop": ["w5"], "min_tokens": 5, "max_tokens": 20},
    {"stop_token_ids": [50]},
    {"stop_token_ids": [50], "include_stop_str_in_output": True},
    {"logprobs": True, "top_logprobs": 2},
    {"path": TEXT, "echo": True, "logprobs": 2},
    {"path": TEXT, "max_tokens": 0, "echo": True},
    {"peagle": {"k": 1}},
    {"peagle": {"method": "none"}},
    {"code": 400, "logit_bias": {"9000": 1}},
    {"code": 400, "max_tokens": 1000},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CONTROL_VARIABLE, str(tmp_path / "control"))
    return tmp_path / "control"


def run_with_engine_process(
    folder: Path,
    test: Callable[[httpx.AsyncClient, Any, EngineClient], Awaitable[None]],
    **changes: Any,
) -> None:
    """Run a test against a server with an engine process, and check that no request remains."""
    settings = replace(
        SETTINGS,
        pair=str(folder / "target"),
        drafter=str(folder / "p-eagle"),
        dtype="float32",
        served_model_names=("tiny",),
        **changes,
    )

    async def main() -> None:
        engines = EngineClient(settings, EngineSet(settings, CONTROLLED))
        backend = create_engine_backend(settings, engines)
        async with client_of(backend) as client:
            await test(client, backend, engines)
            await until(lambda: live_requests(engines) == 0)

    asyncio.run(main())


def live_requests(engines: EngineClient) -> int:
    """Number of requests in the processes, according to their last status."""
    return sum(
        status["running"] + status["waiting"]
        for connection in engines.pool.connections.values()
        for status in connection.status.engines.values()
    )


def only_connection(engines: EngineClient) -> EngineConnection:
    (connection,) = engines.pool.connections.values()
    return connection


def begun_requests(engines: EngineClient) -> int:
    """Number of requests whose answer has begun."""
    connections = engines.pool.connections.values()
    return sum(r.has_tokens for connection in connections for r in connection.requests.values())


def comparable(reply: Any) -> Any:
    if "error" in reply:
        return reply["error"]
    steps = reply["metrics"]["speculative_decoding"]["num_spec_steps"]
    return reply["choices"], reply["usage"], steps


async def collect(client: httpx.AsyncClient, answers: list[Any]) -> None:
    answers += [comparable(await ask(client, **case)) for case in CASES]
    for case in CASES[:3]:
        streamed = await ask(client, stream=True, **case)
        answers.append([event["choices"] for event in streamed if event["choices"]][-1])


def test_failures_of_the_engine_process(
    folder: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of one server is killed, fails, hangs, and finally cannot be restarted."""

    async def test(client: httpx.AsyncClient, backend: Any, engines: EngineClient) -> None:
        await check_killed_process(client, backend, engines, control)
        for failure in ("raise", "lose"):
            await check_failed_step(client, backend, engines, control, failure)
        await check_hung_step(client, backend, engines, control)
        monkeypatch.setattr(engine_supervisor.EngineSupervisor, "max_failures", 3)
        await check_repeated_failures(client, backend, engines, control)

    run_with_engine_process(folder, test, max_batch=2)


async def check_killed_process(
    client: httpx.AsyncClient, backend: Any, engines: EngineClient, control: Path
) -> None:
    """Answers that have begun end with an error. The next process answers all other requests: those
    in the queue, and those that arrive while it starts."""
    expected = (await ask(client))["choices"]
    control.write_text("slow 0.2")
    body = {"messages": HELLO, "temperature": 0, "stream": True} | LONG
    running = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(2)]
    await until(lambda: begun_requests(engines) == 2)
    queued = [asyncio.create_task(ask(client)) for _ in range(6)]
    await until(lambda: len(only_connection(engines).requests) == 8)
    pid = only_connection(engines).status.pid
    os.kill(pid, signal.SIGKILL)
    control.write_text("")
    await until(lambda: not backend.is_healthy)
    arrived = [asyncio.create_task(ask(client)) for _ in range(20)]
    assert (await client.get("/health")).status_code == 503
    for task in running:
        error = events((await task).text)[-1]["error"]
        assert error["code"] == 503 and "the engine stopped" in error["message"]
    for task in queued + arrived:
        assert (await task)["choices"] == expected
    assert backend.counts.restarts == 1 and only_connection(engines).status.pid != pid
    page = (await client.get("/metrics")).text
    assert 'peagle:engine_restarts_total{model_name="tiny"} 1.0' in page


async def check_failed_step(
    client: httpx.AsyncClient, backend: Any, engines: EngineClient, control: Path, failure: str
) -> None:
    control.write_text("slow 0.2")
    running = asyncio.create_task(ask(client, code=503, **LONG))
    await until(lambda: begun_requests(engines))
    control.write_text(failure)
    message = (await running)["error"]["message"]
    assert "the engine stopped" in message and "CUDA" not in message
    await until(lambda: not backend.is_healthy)
    assert (await ask(client))["usage"]["completion_tokens"] == 8
    assert backend.is_healthy


async def check_hung_step(
    client: httpx.AsyncClient, backend: Any, engines: EngineClient, control: Path
) -> None:
    """The process is replaced. The time limit of a step is two seconds in this check only."""
    (supervisor,) = engines.source.engines  # type: ignore[attr-defined]
    settings = supervisor.settings
    restarts = backend.counts.restarts
    control.write_text("slow 0.2")
    running = asyncio.create_task(ask(client, code=503, **LONG))
    await until(lambda: begun_requests(engines))
    control.write_text("slow 600")
    waiting = asyncio.create_task(ask(client))
    supervisor.settings = replace(settings, step_timeout=2.0)
    await until(lambda: not backend.is_healthy)
    supervisor.settings = settings
    control.write_text("")
    assert "the engine stopped" in (await running)["error"]["message"]
    assert (await waiting)["usage"]["completion_tokens"] == 8
    assert backend.counts.restarts == restarts + 1


async def check_repeated_failures(
    client: httpx.AsyncClient, backend: Any, engines: EngineClient, control: Path
) -> None:
    reasons: list[str] = []
    engines.on_failure = reasons.append
    control.write_text("die")
    os.kill(only_connection(engines).status.pid, signal.SIGKILL)
    await until(lambda: not backend.is_healthy)
    assert (await client.get("/health")).status_code == 503
    waiting = asyncio.create_task(ask(client, code=503))
    await until(lambda: reasons)
    assert "could not be loaded" in (await waiting)["error"]["message"]
    assert "3 times in a row" in reasons[0] and "SIGKILL" in reasons[0]
    assert engines.state == "failed"
    assert "could not be loaded" in (await ask(client, code=503))["error"]["message"]


def test_many_answers_a_lost_web_server_and_a_slow_reader(
    folder: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers equal those of an engine in this process."""
    own: list[Any] = []
    served(lambda client, _: collect(client, own))

    async def test(client: httpx.AsyncClient, backend: Any, engines: EngineClient) -> None:
        replies: list[Any] = []
        await collect(client, replies)
        assert replies == own

        expected = (await ask(client, max_tokens=30))["choices"]
        streams = [ask(client, stream=True, max_tokens=30) for _ in range(100)]
        for chunks in await asyncio.gather(*streams):
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            assert text == expected[0]["message"]["content"]

        control.write_text("slow 0.2")
        other = EngineLink(only_connection(engines).state.address, lambda batch: None)
        add = add_message(1, engines.key, [6, 9], GenerationParams(240, ignore_eos=True))
        other.batch().adds.append(add)
        long = asyncio.create_task(ask(client, **LONG))
        await until(lambda: live_requests(engines) == 2)
        other.close()
        await until(lambda: live_requests(engines) == 1)
        control.write_text("")
        assert (await long)["usage"]["completion_tokens"] == 240

        monkeypatch.setattr(answer_module, "MAX_UNREAD_PIECES", 8)
        monkeypatch.setattr(answer_module, "MAX_UNREAD_PIECES_PER_CHOICE", 8)
        async with engines.slot(engines.key) as slot:
            params = GenerationParams(240, ignore_eos=True)
            stream, timing = await engines.add(slot, [6, 9], params)
            assert isinstance(timing, RequestTiming)
            unread = Answer(backend, slot, [Choice([6, 9], timing, stream)])
        await until(lambda: not only_connection(engines).requests)
        assert len(unread._queue) == 1
        with pytest.raises(ApiError, match="too slowly"):
            await unread.next()
        unread.close()

    run_with_engine_process(folder, test)


def test_a_silent_web_server_is_disconnected() -> None:
    """A web server that resumes is notified that its requests have ended."""
    pool = EnginePool(replace(SETTINGS, pair="tiny"), tiny_pair)
    worker = EngineWorker(pool, "inproc://silent-front")
    batches: list[Any] = []
    pool.start()

    async def main() -> None:
        link = EngineLink("inproc://silent-front", batches.append)
        await until(lambda: any(b.status and b.status.target for b in batches))
        add = add_message(1, pool.key, [6, 9], GenerationParams(200, ignore_eos=True))
        assert pool.main is not None
        run = pool.main.engine.loop.run
        pool.main.engine.loop.run = lambda: time.sleep(0.2) or run()  # type: ignore
        link.batch().adds.append(add)
        await until(lambda: any(b.outputs for b in batches))
        link._timer.cancel()

        def fall_silent() -> None:
            for front in worker.fronts.values():
                front.preparing.add(2)
                front.jobs[3] = Future()
                front.last_heard -= 100

        await asyncio.wrap_future(pool.driver.submit(lambda: None))  # The last heartbeat is read.
        await asyncio.wrap_future(pool.driver.submit(fall_silent))
        await until(lambda: any(o.reason == "error" for b in batches for o in b.outputs))
        assert {r.id for b in batches for r in b.refusals} == {2, 3}
        await until(lambda: not worker.fronts and pool.main.engine.idle)
        link.close()

    asyncio.run(main())
    pool.close()
    worker.close()


def failure_of(settings: Any) -> str:
    """Return why a server with these settings ends."""
    reasons: list[str] = []

    async def main() -> None:
        engines = EngineClient(settings, EngineSet(settings, CONTROLLED))
        engines.on_failure = reasons.append
        engines.start()
        await until(lambda: reasons)
        await engines.close()

    asyncio.run(main())
    return reasons[0]


@pytest.mark.slow  # test_live.py covers this from the command line.
def test_a_pair_that_cannot_be_loaded(tmp_path: Path, control: Path) -> None:
    assert "nothing" in failure_of(replace(SETTINGS, pair=str(tmp_path / "nothing")))


def test_a_process_that_dies_while_loading(control: Path) -> None:
    """After three attempts, the error contains the last output of the process."""
    control.write_text("die")
    reason = failure_of(SETTINGS)
    assert "cannot be started" in reason and "SIGKILL" in reason
    assert "no memory is left on this GPU" in reason


def test_one_of_two_replicas_is_killed(folder: Path, control: Path) -> None:
    """Streams of the killed replica end with an error; the other answers its queued requests."""

    async def test(client: httpx.AsyncClient, backend: Any, engines: EngineClient) -> None:
        await until(lambda: all(c.ready for c in engines.pool.connections.values()))
        expected = (await ask(client))["choices"]
        control.write_text("slow 0.2")
        body = {"messages": HELLO, "temperature": 0, "stream": True} | LONG
        running = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(2)]
        await until(lambda: begun_requests(engines) == 2)
        first, second = engines.pool.connections.values()
        assert [len(first.requests), len(second.requests)] == [1, 1]
        queued = [asyncio.create_task(ask(client)) for _ in range(4)]
        await until(lambda: len(first.requests) + len(second.requests) == 6)
        os.kill(first.status.pid, signal.SIGKILL)
        await until(lambda: not first.ready)
        assert backend.is_healthy
        control.write_text("")
        ends = ["error" in events((await task).text)[-1] for task in running]
        assert sorted(ends) == [False, True]
        for task in queued:
            assert (await task)["choices"] == expected
        status = (await client.get("/v1/peagle/status")).json()
        assert [worker["name"] for worker in status["workers"]] == ["replica-0", "replica-1"]
        page = (await client.get("/metrics")).text
        assert 'engine="p-eagle replica-0"' in page and 'engine="p-eagle replica-1"' in page

    run_with_engine_process(folder, test, max_batch=1, replicas=2, device="cpu")


@pytest.mark.slow  # test_replicas.py covers a server with more processes.
def test_the_process_ends_with_its_front(folder: Path) -> None:
    with live_server(folder) as server:
        ready = server.log_line("worker ready")
        child = Path(f"/proc/{ready['pid']}")
        assert child.exists()
        server.process.kill()
        server.process.wait()
        asyncio.run(until(lambda: not child.exists()))


@pytest.mark.slow  # test_replicas.py and test_http_workers.py cover servers with more processes.
def test_sigterm_leaves_no_process(folder: Path) -> None:
    with live_server(folder) as server:
        ready = server.log_line("worker ready")
        assert server.stop() == 0
        assert not Path(f"/proc/{ready['pid']}").exists()


def test_a_second_sigterm_ends_the_server_at_once(folder: Path, control: Path) -> None:
    """The server does not wait for answers, and no process or folder remains."""
    with tempfile.TemporaryDirectory() as temporary:
        stop_twice(folder, control, Path(temporary))


def stop_twice(folder: Path, control: Path, temporary: Path) -> None:
    control.write_text("slow 0.2")
    body = LONG | {"prompt": "w6 w9", "stream": True}
    module = "tests.support.server.controlled_serve"
    with live_server(folder, module=module, TMPDIR=str(temporary)) as server:
        ready = server.log_line("worker ready")
        with httpx.stream("POST", server.url + TEXT, json=body, timeout=60) as answer:
            assert next(answer.iter_lines())
            assert list(temporary.iterdir())
            server.process.send_signal(signal.SIGTERM)
            server.log_line("draining")
            assert server.stop() == 0
    asyncio.run(until(lambda: not Path(f"/proc/{ready['pid']}").exists()))
    asyncio.run(until(lambda: not list(temporary.glob("peagle-*"))))

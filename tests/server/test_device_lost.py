"""After a sticky error of the device nothing is retried: requests fail, and the process ends."""

import asyncio
from collections.abc import Generator
from typing import Any

import httpx
import pytest

from peagle.server import run
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.settings import ServerSettings
from tests.support.serving import (
    TEXT,
    ask,
    events,
    make_backend,
    running,
    served,
    until,
)

LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True}


def lost(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nhints follow")


def lose_device(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call to the device raises from now on; a new engine cannot be built either."""
    monkeypatch.setattr(backend.engines.factory, "build", lost)
    monkeypatch.setattr(backend.engines.factory, "release_memory", lost)
    for slot in backend.engines.slots:
        stepper = slot.engine.loop.stepper
        monkeypatch.setattr(stepper, "decode", lost)
        monkeypatch.setattr(stepper.prefill, "run", lost)
        monkeypatch.setattr(stepper.kv_cache, "zero_pages", lost)


@pytest.mark.parametrize("stream", [True, False])
def test_requests_fail_and_the_server_ends(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    backend = make_backend()
    with running(backend) as (server, url):
        httpx.post(url + TEXT, json=LONG | {"peagle": {"k": 2}}, timeout=60)
        assert len(backend.engines.slots) == 2
        lose_device(backend, monkeypatch)
        reply = httpx.post(url + TEXT, json=LONG | {"stream": stream}, timeout=60)
        if stream and reply.status_code == 200:
            error = events(reply.text)[-1]["error"]
        else:
            assert reply.status_code == 503
            error = reply.json()["error"]
        assert "CUDA" not in error["message"] and error["code"] == 503
        asyncio.run(until(lambda: server.should_exit))
    assert server.failure is not None and "illegal memory access" in server.failure
    pool = backend.engines
    assert pool.device_lost and pool.restarts == 0 and not pool.slots
    assert not pool.driver.alive


def test_a_lost_device_found_by_a_job_ends_the_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is built, or a prompt is scored, while no engine has a step to run."""

    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        failures: list[str] = []
        backend.engines.on_failure = failures.append
        monkeypatch.setattr(backend.engines.factory, "build", lost)
        await ask(client, code=503, peagle={"k": 2})
        await until(lambda: failures)
        assert backend.engines.state == "lost" and not backend.is_healthy
        error = await ask(client, code=503)
        assert "the device is lost" in error["error"]["message"]

        def scoring() -> Generator[None, None, None]:
            yield
            lost()

        backend.engines.driver.submit_long(scoring(), tokens=1)
        await ask(client, code=503)
        assert len(failures) == 1

    served(test)


def test_a_device_lost_while_the_engine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, backend: LocalBackend) -> None:
        failures: list[str] = []
        backend.engines.on_failure = failures.append
        assert backend.engines.main is not None
        monkeypatch.setattr(backend.engines.factory, "build", lost)
        monkeypatch.setattr(backend.engines.main.engine.loop, "_prefill", lambda *_: 1 / 0)
        await ask(client, code=503)
        await until(lambda: failures)
        assert (backend.engines.state, backend.engines.restarts) == ("lost", 1)

    served(test)


def test_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` leaves without destructors, and with a code that is not zero."""
    codes: list[int] = []

    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    backend = make_backend(lost)
    monkeypatch.setattr(run.os, "_exit", leave)
    monkeypatch.setattr(run, "create_backend", lambda settings: backend)
    monkeypatch.setattr(run, "set_up_logging", lambda: None)
    with pytest.raises(Exited):
        run.serve(ServerSettings(pair="tiny", port=0))
    assert codes == [3] and backend.engines.device_lost

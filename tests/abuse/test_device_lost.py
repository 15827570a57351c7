"""A device that is lost under load: the engine process is replaced."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.live_server import LiveServer, live_server
from tests.support.server.serving import TEXT, events

pytestmark = pytest.mark.abuse

LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True, "stream": True}
OPTIONS = ("--max-batch", "8", "--kv-tokens", "4096", "--device", "cpu")


def ask(server: LiveServer) -> None:
    reply = httpx.post(server.url + TEXT, json=LONG, timeout=60)
    assert "error" not in events(reply.text)[-1]


@pytest.mark.parametrize("replicas", [(), ("--replicas", "1")])
def test_the_engine_process_is_replaced(
    replicas: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    module = "tests.support.server.faulty_device"
    options = (*OPTIONS, *replicas)
    with live_server(folder, *options, module=module, FAULT=str(fault)) as server:
        pid = worker_of(server)["pid"]
        ask(server)
        fault.touch()
        ask(server)  # The fault occurs before the first token: the next process answers.
        end = time.monotonic() + 90
        while worker_of(server)["state"] != "ready" or worker_of(server)["pid"] == pid:
            assert time.monotonic() < end, server.log
            time.sleep(0.2)
        codes = [line["code"] for line in server.log if line["event"] == "worker ended"]
        assert codes == [3]
        reply = httpx.post(server.url + TEXT, json=LONG | {"stream": False}, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 200


def worker_of(server: LiveServer) -> dict[str, Any]:
    status = httpx.get(f"{server.url}/v1/peagle/status", timeout=60).json()
    return status["workers"][0]  # type: ignore[no-any-return]

"""A device that is lost under load: the process ends, or the gateway replaces the replica."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer, live_server
from tests.support.serving import TEXT, events

pytestmark = pytest.mark.abuse

LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True, "stream": True}
OPTIONS = ("--max-batch", "8", "--kv-tokens", "4096", "--device", "cpu")


def ask_until_it_fails(server: LiveServer, fault: Path) -> dict[str, Any]:
    """The error of the answer that meets the fault."""
    assert "error" not in events(httpx.post(server.url + TEXT, json=LONG, timeout=60).text)[-1]
    fault.touch()
    reply = httpx.post(server.url + TEXT, json=LONG, timeout=60)
    last = events(reply.text)[-1] if reply.status_code == 200 else reply.json()
    return last["error"]  # type: ignore[no-any-return]


def test_the_process_ends_with_a_code(folder: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    module = "tests.support.faulty_device"
    with live_server(folder, *OPTIONS, module=module, FAULT=str(fault)) as server:
        error = ask_until_it_fails(server, fault)
        assert error["code"] == 503 and "CUDA" not in error["message"]
        assert server.process.wait(timeout=30) == 3
        logged = [line["event"] for line in server.log]
        assert "device lost" in logged and "engine to be made again" not in logged


def test_a_replica_is_replaced(folder: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    module = "tests.support.faulty_device"
    options = (*OPTIONS, "--replicas", "1")
    with live_server(folder, *options, module=module, FAULT=str(fault)) as server:
        pid = worker_of(server)["pid"]
        assert ask_until_it_fails(server, fault)["code"] == 503
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

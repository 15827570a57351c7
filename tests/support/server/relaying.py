"""A gateway with a fake vLLM (failing_vllm.py) on a real socket, and complete servers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from peagle.server.settings import ServerSettings
from peagle.server.vllm.gateway import Gateway
from peagle.server.vllm.vllm_launch import VllmLaunch
from peagle.server.vllm.vllm_process import VllmProcess
from peagle.server.web_server import Server
from tests.support.server.server_thread import on_a_thread
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]


def make_gateway(
    folder: Path,
    unhealthy_timeout: float = 0.2,
    restart_timeout: float = VllmProcess.restart_timeout,
    **changes: Any,
) -> Gateway:
    def prepare(socket: Path) -> VllmLaunch:
        command = (
            sys.executable,
            "-m",
            "tests.support.server.failing_vllm",
            str(socket),
            str(folder),
        )
        return VllmLaunch(command, dict(os.environ) | {"PYTHONPATH": str(ROOT)}, "none", 0)

    options: dict[str, Any] = {"pair": "fake", "backoff": 0.1, "drain_seconds": 5.0}
    gateway = Gateway(ServerSettings(**options | {"timeout": 60.0} | changes), prepare)
    gateway.process.unhealthy_timeout = unhealthy_timeout
    gateway.process.restart_timeout = restart_timeout
    return gateway


@contextmanager
def running_gateway(gateway: Gateway, ready: bool = True) -> Iterator[tuple[Server, str]]:
    """Run a server with the gateway; with `ready`, wait until its vLLM is ready."""
    with on_a_thread(gateway) as (server, url):
        wait_for(lambda: server.loop is not None and (is_ready(gateway) or not ready))
        yield server, url


def is_ready(gateway: Gateway) -> bool:
    return gateway.process.state == "ready"


def fake_pids(folder: Path) -> list[int]:
    """Return the pids of the fake vLLM and of its child process."""
    return [int(word) for word in (folder / "pids").read_text().split()]


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))

    def collect(parent: int) -> list[int]:
        own = children.get(parent, [])
        return [*own, *(pid for child in own for pid in collect(child))]

    return collect(pid)


@contextmanager
def running_command(
    log: Path, *args: str, seconds: float = 120.0, **environment: str
) -> Iterator[tuple[Any, str]]:
    """Run `peagle serve` as a process, wait until it is healthy, and write its log to a file."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SM_VLLM_")
    }
    with log.open("w") as file:
        command = [sys.executable, "-m", "peagle", "serve", "--port", "0", *args]
        process = subprocess.Popen(command, env=inherited | environment, stderr=file)
    try:
        wait_for(lambda: '"listening"' in log.read_text(), seconds)
        url = f"http://127.0.0.1:{log_events(log, 'listening')[0]['port']}"
        wait_for(lambda: process.poll() is not None or is_healthy(url), seconds)
        assert process.poll() is None, log.read_text()[-3000:]
        yield process, url
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def log_events(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the log lines of this event; the last line may be incomplete."""
    events = []
    for line in log.read_text().split("\n")[:-1]:
        with suppress(ValueError):
            fields = json.loads(line)
            if fields["event"] == event:
                events.append(fields)
    return events


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

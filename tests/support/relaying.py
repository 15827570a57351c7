"""Gateways over fake workers (fake_worker.py), behind a real socket."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from peagle.server.run import Server
from peagle.server.settings import ServerSettings
from peagle.server.workers.gateway import Gateway
from peagle.server.workers.launch_spec import RESTART_TIMEOUT_SECONDS, LaunchSpec
from peagle.server.workers.worker import Worker
from tests.support.serving import on_a_thread

ROOT = Path(__file__).parents[2]


class FakeKind:
    status_path = "/metrics"

    def __init__(
        self, folder: Path, count: int, unhealthy_timeout: float, restart_timeout: float
    ) -> None:
        self.folder = folder
        self.count = count
        self.unhealthy_timeout = unhealthy_timeout
        self.restart_timeout = restart_timeout

    def launch_specs(self, folder: Path) -> list[LaunchSpec]:
        return [self._launch_spec(f"fake-{i}", folder / f"{i}.sock") for i in range(self.count)]

    def _launch_spec(self, name: str, socket: Path) -> LaunchSpec:
        module = "tests.support.fake_worker"
        return LaunchSpec(
            name,
            command=(sys.executable, "-m", module, str(socket), str(self.folder), name),
            environment=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
            socket=socket,
            unhealthy_timeout=self.unhealthy_timeout,
            restart_timeout=self.restart_timeout,
        )

    def prepare_body(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def status(self, responses: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        engines = {worker.name: response.text for worker, response in responses.items()}
        return {"methods": ["none"], "method": "none", "k": 0, "engines": engines}


def make_gateway(
    folder: Path,
    count: int = 2,
    unhealthy_timeout: float = 0.2,
    restart_timeout: float = RESTART_TIMEOUT_SECONDS,
    **changes: Any,
) -> Gateway:
    options: dict[str, Any] = {"pair": "fake", "backoff": 0.1, "drain_seconds": 5.0}
    settings = ServerSettings(**options | {"timeout": 60.0} | changes)
    return Gateway(settings, FakeKind(folder, count, unhealthy_timeout, restart_timeout))


@contextmanager
def running_gateway(gateway: Gateway, ready: int | None = None) -> Iterator[tuple[Server, str]]:
    """Run a server over the gateway; wait until `ready` workers are ready (None: all)."""
    with on_a_thread(gateway) as (server, url):
        count = gateway.kind.count if ready is None else ready  # type: ignore[attr-defined]
        wait_for(lambda: len(gateway.workers.ready) >= count and server.loop is not None)
        yield server, url


def wait_for(condition: Callable[[], Any], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def pids_of(folder: Path, worker: Worker | str) -> list[int]:
    """Return the pids of a fake worker's process and of the child that it would leave behind."""
    name = worker if isinstance(worker, str) else worker.name
    return [int(word) for word in (folder / f"{name}.pids").read_text().split()]


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
    """Run `peagle serve` as a process, once it is healthy; its log goes into a file."""
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

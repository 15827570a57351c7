"""Gateways over pretended workers (fake_worker.py), behind a real socket."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from peagle.server.run import Server
from peagle.server.settings import ServerSettings
from peagle.server.workers.gateway import Gateway
from peagle.server.workers.worker import Launch, Worker
from tests.support.serving import on_a_thread

ROOT = Path(__file__).parents[2]


class FakeKind:
    status_path = "/metrics"

    def __init__(self, folder: Path, count: int, patience: float = 0.2) -> None:
        self.folder, self.count, self.patience = folder, count, patience

    def launches(self, sockets: Path) -> list[Launch]:
        environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
        return [
            Launch(
                f"fake-{i}",
                (
                    sys.executable,
                    "-m",
                    "tests.support.fake_worker",
                    str(sockets / f"{i}.sock"),
                    str(self.folder),
                    f"fake-{i}",
                ),
                environment,
                sockets / f"{i}.sock",
                self.patience,
            )
            for i in range(self.count)
        ]

    def passed_on(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def status(self, replies: Any) -> dict[str, Any]:
        return {
            "methods": ["none"],
            "method": "none",
            "k": 0,
            "engines": {w.name: r.text for w, r in replies.items()},
        }


def gateway_of(folder: Path, count: int = 2, patience: float = 0.2, **changes: Any) -> Gateway:
    settings = ServerSettings(
        **{"pair": "fake", "backoff": 0.1, "drain_seconds": 5.0, "timeout": 60.0} | changes
    )
    return Gateway(settings, FakeKind(folder, count, patience))


@contextmanager
def passing(gateway: Gateway, ready: int | None = None) -> Iterator[tuple[Server, str]]:
    """So many workers are ready."""
    with on_a_thread(gateway) as (server, url):
        wanted = gateway.kind.count if ready is None else ready  # type: ignore[attr-defined]
        wait_for(lambda: len(gateway.workers.ready) >= wanted and server.loop is not None)
        yield server, url


def wait_for(true: Callable[[], Any], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def pids_of(folder: Path, worker: Worker | str) -> list[int]:
    """A pretended worker's process, and the one that it would leave behind."""
    name = worker if isinstance(worker, str) else worker.name
    return [int(word) for word in (folder / f"{name}.pids").read_text().split()]


def below(pid: int) -> list[int]:
    """All processes that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(entry.read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.parent.name)
            )
        except OSError:
            continue
    found = parents.get(pid, [])
    return [*found, *(deeper for child in found for deeper in below(child))]


@contextmanager
def serving(
    log: Path, *args: str, seconds: float = 120.0, **environment: str
) -> Iterator[tuple[Any, str]]:
    """`peagle serve` as people start it, when it answers; its log goes into a file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SM_VLLM_")}
    with log.open("w") as file:
        command = [sys.executable, "-m", "peagle", "serve", "--port", "0", *args]
        process = subprocess.Popen(command, env=kept | environment, stderr=file)
    try:
        wait_for(lambda: '"listening"' in log.read_text(), seconds)
        url = f"http://127.0.0.1:{lines_of(log, 'listening')[0]['port']}"
        wait_for(lambda: process.poll() is not None or healthy(url), seconds)
        assert process.poll() is None, log.read_text()[-3000:]
        yield process, url
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def lines_of(log: Path, event: str) -> list[dict[str, Any]]:
    """The server's own lines, its workers' left out; the last one may be half written."""
    found = []
    for line in log.read_text().split("\n")[:-1]:
        with suppress(ValueError):
            told = json.loads(line)
            found += [told] if told["event"] == event else []
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

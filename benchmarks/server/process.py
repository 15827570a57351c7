"""`peagle serve` as a process: what benchmarks of the server start, ask and look into.

It needs nothing but the standard library, so that a benchmark's own process stays small.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY_SECONDS = 600.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ServerProcess:
    process: "subprocess.Popen[bytes]"
    url: str
    log: Path
    ready_seconds: float  # From the start of the process to the first 200 of /health.

    def status(self) -> dict[str, Any]:
        return dict(json.loads(get(f"{self.url}/v1/peagle/status")))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """Of the first engine process; a server without one runs the engine itself."""
        workers = self.status().get("workers") or [{}]
        return int(workers[0].get("pid") or self.pid)

    def engines(self) -> list[dict[str, Any]]:
        """The status of every engine."""
        return list(self.status().get("engines", {}).values())

    def wait_for_graphs(self) -> float:
        """Wait until no engine has CUDA graphs left to capture; returns the seconds."""
        started = time.perf_counter()
        while any(engine.get("pending_graphs") for engine in self.engines()):
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - started

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [fields for line in lines if (fields := json.loads(line))["event"] == event]


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return bytes(reply.read())


def is_healthy(url: str) -> bool:
    try:
        get(f"{url}/health")
        return True
    except OSError:
        return False


def resident_mb(pid: int) -> float:
    """Resident memory in MB; 0.0 for a process that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_roles(server_pid: int) -> dict[int, str]:
    """The processes of a server by their part in it: front, engine, supervisor (without guards)."""
    roles: dict[int, str] = {}
    pending = [server_pid]
    while pending:
        pid = pending.pop()
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            threads = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
            for thread in threads:
                children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        pending += [int(child) for child in children if int(child) not in roles]
        text = " ".join(command)
        if "process_guard" in text:
            continue
        roles[pid] = "engine" if "worker.main" in text else "front"
        if "front_process" in text:
            roles[server_pid] = "supervisor"
    return roles


@contextmanager
def serving(
    arguments: Sequence[str],
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[ServerProcess]:
    """Run `peagle serve` of the source tree `root`, once it is healthy; `log` keeps its log."""
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "log"
        command = [sys.executable, "-m", "peagle", "serve", "--port", "0", *arguments]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, **(environment or {}), "PYTHONPATH": path}
        started = time.perf_counter()
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=root, env=variables, stderr=file)
        try:
            url = wait_until_healthy(process, log)
            yield ServerProcess(process, url, log, time.perf_counter() - started)
        finally:
            stop(process)


def wait_until_healthy(process: "subprocess.Popen[bytes]", log: Path) -> str:
    url = ""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-3000:]}")
        first, newline, _ = log.read_text().partition("\n")
        if newline and first.startswith("{"):
            url = f"http://127.0.0.1:{json.loads(first)['port']}"
        if url and is_healthy(url):
            return url
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"the server was not ready after {READY_SECONDS:.0f} seconds")


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

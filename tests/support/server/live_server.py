"""`peagle serve` as a process with a tiny pair, for abuse tests and others."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.server.relaying import descendants

READY_SECONDS = 120.0


@dataclass
class LiveServer:
    process: subprocess.Popen[str]
    port: int
    log: list[dict[str, Any]] = field(default_factory=list)  # parsed lines of its log
    log_grew: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss_mb(self) -> float:
        """Resident memory of the process and its descendants, in MB."""
        pages = 0
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with suppress(OSError):  # the process has ended meanwhile
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def health_seconds(self, timeout: float = 60.0) -> float:
        """Seconds until `/health` answers 200."""
        start = time.perf_counter()
        assert httpx.get(f"{self.url}/health", timeout=timeout).status_code == 200
        return time.perf_counter() - start

    def slowest_health(self, seconds: float) -> float:
        """The slowest answer of `/health` within `seconds` of polling."""
        end = time.monotonic() + seconds
        slowest = 0.0
        while time.monotonic() < end:
            slowest = max(slowest, self.health_seconds())
            time.sleep(0.02)
        return slowest

    def log_line(self, event: str, timeout: float = 120.0, **fields: Any) -> dict[str, Any]:
        """The first log line of this event with these fields. Waits for it.

        A supervisor and a front learn from the engine process separately, so "worker ready" may
        come after `/health` answers 200.
        """
        wanted = {"event": event} | fields

        def first_line() -> dict[str, Any] | None:
            return next((line for line in self.log if wanted.items() <= line.items()), None)

        with self.log_grew:
            line = self.log_grew.wait_for(first_line, timeout)
        assert line is not None, f"no log line {wanted}: {self.log}"
        return line

    def stop(self, timeout: float = 120.0) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=timeout)


@contextmanager
def live_server(
    folder: Path,
    *options: str,
    module: str = "peagle",
    descriptors: int | None = None,
    **environment: str,
) -> Iterator[LiveServer]:
    """Serve the tiny pair in `folder` (made by `tiny_folder`) until the block ends.

    `descriptors` limits the files and sockets that the process may open.
    """
    command = [sys.executable, "-m", module, "serve", str(folder / "target")]
    command += ["--drafter", str(folder / "p-eagle"), "--dtype", "float32", "--port", "0", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(
        command, env=os.environ | threads | environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    server = LiveServer(process, json.loads(process.stderr.readline())["port"])
    reader = threading.Thread(target=_read_log, args=(server,), daemon=True)
    reader.start()
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=5)


def _read_log(server: LiveServer) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        if line.startswith("{"):
            with server.log_grew:
                server.log.append(json.loads(line))
                server.log_grew.notify_all()


def _wait_until_ready(server: LiveServer) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if httpx.get(f"{server.url}/health", timeout=60).status_code == 200:
            return
        assert server.process.poll() is None, f"the server ended: {server.log}"
        time.sleep(0.1)
    raise AssertionError(f"not ready after {READY_SECONDS:.0f} s: {server.log}")

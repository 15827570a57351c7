"""The log of a worker is always read: otherwise the worker blocks on its output."""

import asyncio
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.server.supervisor import child_process
from peagle.server.supervisor.child_process import ChildProcess
from peagle.server.supervisor.launch_spec import LaunchSpec

LINES = 5000  # several times the capacity of a pipe
CHATTY = f"""
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
for i in range({LINES}):
    print(json.dumps({{"event": f"line {{i}}", "text": "x" * 100}}), flush=True)
(folder / "written").touch()
while not (folder / "disk has space again").exists():
    time.sleep(0.01)
print(json.dumps({{"event": "the last line"}}), flush=True)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the worker is blocked"
        time.sleep(0.01)


def start(script: str, folder: Path) -> ChildProcess:
    command = (sys.executable, "-c", script, str(folder))
    return ChildProcess(LaunchSpec("worker-0", command, dict(os.environ), folder / "socket"))


def test_a_full_disk_does_not_block_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        child_process, "log_event", lambda event, *_, **fields: events.append((event, fields))
    )
    process = None
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        try:
            process = start(CHATTY, tmp_path)
            wait_until((tmp_path / "written").exists)
            wait_until(lambda: process._lost_lines == LINES)
            monkeypatch.setattr(sys, "stderr", io.StringIO())
            (tmp_path / "disk has space again").touch()
            wait_until(lambda: not process.is_running)
            written = sys.stderr
        finally:
            if process is not None:
                asyncio.run(process.stop())
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # for buffered lines
    assert isinstance(written, io.StringIO)
    assert json.loads(written.getvalue()) == {"event": "the last line", "worker": "worker-0"}
    assert process.log_tail[-2:] == [f"line {LINES - 1}", "the last line"]
    assert ("log lines lost", {"worker": "worker-0", "lines": LINES}) in events


def test_a_line_of_nested_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's JSON reader raises RecursionError for it."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    process = start("print('[' * 200_000); print('the next line')", tmp_path)
    wait_until(lambda: len(process.log_tail) == 2)
    assert process.log_tail[-1] == "the next line"
    asyncio.run(process.stop())

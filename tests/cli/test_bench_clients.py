"""`peagle bench --endpoint --clients`: a real server, Ctrl-C and resuming, a client that dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.load.endpoint import EndpointRunner
from tests.support.bench.benching import serving, write_set
from tests.support.command_line import run
from tests.support.server.serving import make_backend, running

SECONDS = 180.0


@pytest.fixture
def load(tmp_path: Path) -> list[object]:
    """The options of a run of two cells."""
    tasks = write_set(tmp_path / "talk.jsonl", 6)
    small = ["--max-tokens", 8, "--warmup", 2, "--clients", 2, "--concurrency", "2,3"]
    return ["--set", tasks, "--out", tmp_path, "--name", "r", *small]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(make_backend()) as (_, url):
        yield url


def read_result(folder: Path) -> dict[str, Any]:
    path = folder / "r.json"
    return json.loads(path.read_text()) if path.exists() else {"cells": []}


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The client processes, without Python's resource tracker process."""
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(word): Path(f"/proc/{word}/cmdline").read_text() for word in words}
    return [child for child, command in commands.items() if "spawn_main" in command]


def test_two_clients_of_a_real_server(url: str, load: list[object], tmp_path: Path) -> None:
    run("bench", "--endpoint", url, *load, "--repeats", 1)
    result = read_result(tmp_path)
    assert result["settings"]["clients"] == 2
    assert [cell["concurrency"] for cell in result["cells"]] == [2, 3]
    for cell in result["cells"]:
        assert (cell["requests"], cell["failed"], cell["total_output_tokens"]) == (6, 0, 48)
        assert 0 < cell["median_ttft_ms"] <= cell["p99_ttft_ms"]
        assert 0 < cell["median_tpot_ms"] <= cell["p99_tpot_ms"]
        assert cell["spec_decode_num_drafts"] > 0


def accept_interrupts() -> None:
    """A background job of a shell ignores Ctrl-C, and so do the processes that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt(process: subprocess.Popen[str]) -> str:
    """Send Ctrl-C until the process ends: Python ignores an interrupt that arrives in a finalizer.

    Returns the output of the process.
    """
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)  # to the whole process group, like a terminal
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=SECONDS / 3)[1]
    raise AssertionError("the process goes on after three interrupts")


def test_ctrl_c_ends_the_clients_and_the_run_resumes(
    url: str, load: list[object], tmp_path: Path
) -> None:
    arguments = ["bench", "--endpoint", url, *load, "--repeats", 400]
    command = [sys.executable, "-m", "peagle", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=accept_interrupts,
    )
    try:
        wait_until(lambda: read_result(tmp_path)["cells"])
        clients = children(process.pid)
        assert len(clients) == 2
        message = interrupt(process)
    finally:
        process.kill()
    assert process.returncode == 130, message
    assert "the same command resumes the run" in " ".join(message.split())
    assert "Traceback" not in message
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in clients))
    kept = sum(cell["repeats"] for cell in read_result(tmp_path)["cells"])
    assert 0 < kept < 800
    assert "settings clients 2 instead of 3" in run(*arguments, "--clients", 3, code=2)


def test_a_stopped_run_resumes(
    url: str, load: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--endpoint", url, *load, "--repeats", 2]
    measured: list[Any] = []
    runners: list[EndpointRunner] = []
    whole = EndpointRunner.run

    def stopped(self: EndpointRunner, key: Any, jobs: Any, on_request: Any) -> Any:
        runners.append(self)
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(key)
        return whole(self, key, jobs, on_request)

    monkeypatch.setattr(EndpointRunner, "run", stopped)
    assert "the same command resumes" in " ".join(run(*arguments, code=130).split())
    assert runners[-1].processes is not None
    assert not any(process.is_alive() for process in runners[-1].processes.processes)
    assert sum(cell["repeats"] for cell in read_result(tmp_path)["cells"]) == 3
    measured.clear()
    run(*arguments)
    assert len(measured) == 1
    assert [cell["repeats"] for cell in read_result(tmp_path)["cells"]] == [2, 2]
    run(*arguments)
    assert len(measured) == 1  # complete


def test_a_client_that_dies_is_reported_and_finished_runs_are_kept(
    load: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = EndpointRunner.run

    def deadly(self: EndpointRunner, key: Any, jobs: Any, on_request: Any) -> Any:
        if self.processes is not None:  # from the second run on
            os.kill(self.processes.processes[1].pid, signal.SIGKILL)
        return whole(self, key, jobs, on_request)

    monkeypatch.setattr(EndpointRunner, "run", deadly)
    with serving() as server:
        message = run("bench", "--endpoint", server.url, *load, "--repeats", 2, code=2)
    assert re.search(r"client 2 of 2 \(process \d+\) was killed by SIGKILL", message)
    assert "use fewer --clients" in " ".join(message.split())
    assert sum(cell["repeats"] for cell in read_result(tmp_path)["cells"]) == 1

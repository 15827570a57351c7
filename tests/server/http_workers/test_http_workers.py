"""`peagle serve --http-workers 2`: two web servers ("fronts"), one socket, one engine process."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import read_documents
from tests.support.models.versions import add_version, load_folder
from tests.support.server.live_server import LiveServer, live_server
from tests.support.server.relaying import descendants, is_alive
from tests.support.server.serving import TEXT, tiny_folder
from tests.support.waiting import wait_for

OPTIONS = ("--max-batch", "8", "--kv-tokens", "4096", "--device", "cpu", "-k", "2")
LONG: dict[str, Any] = {
    "prompt": "w6 w9",
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    control = folder / "control"
    environment = {"PEAGLE_TEST_CONTROL": str(control), "PEAGLE_API_KEY": "secret"}
    environment["PEAGLE_LEARN_OPT_OUT"] = "secret"
    options = (*OPTIONS, "--http-workers", "2", "--served-model-name", "tiny")
    options += ("--learn", str(folder / "learn"))
    module = "tests.support.server.controlled_serve"
    with live_server(folder, *options, module=module, **environment) as live:
        live.control = control  # type: ignore[attr-defined]
        wait_for(lambda: len(pids(live, "front ready")) == 2)
        wait_for(lambda: both_answer(live))
        yield live


def control(server: LiveServer, text: str) -> None:
    server.control.write_text(text)  # type: ignore[attr-defined]


def both_answer(server: LiveServer) -> bool:
    """Whether both fronts answer; one may connect to a new engine later than the other."""
    before = len(server.log)
    if any(short_answer(server) != 200 for _ in range(4)):
        return False
    return fronts_in(server, before) == {"front-0", "front-1"}


def short_answer(server: LiveServer) -> int:
    body = LONG | {"max_tokens": 2}
    return httpx.post(server.url + TEXT, json=body, headers=KEY, timeout=60).status_code


def fronts_in(server: LiveServer, start: int) -> set[str]:
    lines = [line for line in server.log[start:] if line["event"] == "request"]
    return {line["worker"] for line in lines if line["path"] == TEXT}


def metric(server: LiveServer, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def pids(server: LiveServer, event: str) -> list[int]:
    return [line["pid"] for line in server.log if line["event"] == event]


def engine_pid(server: LiveServer) -> int:
    """The pid of the first engine process."""
    pid: int = server.log_line("worker ready", worker="engine")["pid"]
    return pid


class Streams:
    """Requests streams on threads; `ends` contains the end of each stream."""

    def __init__(self, server: LiveServer, count: int) -> None:
        self.server = server
        self.ends: dict[int, str] = {}
        self.tokens = [0] * count
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, i: int) -> None:
        self.ends[i] = "lost"
        url = self.server.url + TEXT
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=LONG, headers=KEY, timeout=60) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.tokens[i] += 1
                    data = json.loads(line.removeprefix("data: "))
                    end = data["choices"][0]["finish_reason"] if "choices" in data else "error"
                    self.ends[i] = end or "cut"

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(60)
        return sorted(self.ends.values())


def begun_streams(server: LiveServer, count: int = 8) -> Streams:
    """Start streams and wait until each has begun."""
    streams = Streams(server, count)
    wait_for(lambda: all(streams.tokens))
    return streams


def streams_on_both_fronts(server: LiveServer, fronts: list[int]) -> Streams:
    """Start slow streams until both fronts have some: the front of a connection is random.

    A front may close connections of earlier requests late, so that the count of streams is too low.
    """
    for _ in range(20):
        before = [open_sockets(front) for front in fronts]
        control(server, "slow 0.3")
        streams = begun_streams(server)
        counts = [open_sockets(front) - n for front, n in zip(fronts, before, strict=True)]
        if all(count > 0 for count in counts) and sum(counts) == 8:
            return streams
        control(server, "")
        streams.join()
        until_idle(server)
    raise AssertionError("all streams went to one front, in 20 rounds")


def open_sockets(pid: int) -> int:
    folder = f"/proc/{pid}/fd"
    links = []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"{folder}/{name}"))
    return sum(link.startswith("socket:") for link in links)


def until_idle(server: LiveServer, idle: Callable[[float], bool] = lambda n: n == 0) -> None:
    wait_for(lambda: idle(metric(server, "vllm:num_requests_running{")))


def test_metrics_are_summed(server: LiveServer) -> None:
    names = (
        'peagle:requests_total{model_name="tiny",status="200"}',
        "vllm:e2e_request_latency_seconds_count",
        "vllm:generation_tokens_total",
    )
    for _ in range(10):
        body = LONG | {"max_tokens": 5, "stream": False}
        reply = httpx.post(server.url + TEXT, json=body, headers=KEY, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 5

    def are_counted() -> bool:  # A front counts and logs an answer after it is sent completely.
        lines = [line for line in server.log if line["event"] == "request" and line["path"] == TEXT]
        tokens = [line["completion_tokens"] for line in lines if line["status"] == 200]
        expected = [len(tokens), len(tokens), sum(tokens)]
        return tokens.count(5) == 10 and [metric(server, name) for name in names] == expected

    wait_for(lambda: all(are_counted() for _ in range(6)))  # from both fronts
    assert httpx.post(server.url + TEXT, json=LONG, timeout=60).status_code == 401


def test_metric_files_are_allocated_in_advance(server: LiveServer) -> None:
    """On a full disk, a write to an unallocated part of a mapped file would kill a front."""
    environment = Path(f"/proc/{pids(server, 'front ready')[0]}/environ").read_bytes()
    name = b"PROMETHEUS_MULTIPROC_DIR="
    folder = next(v for v in environment.split(b"\0") if v.startswith(name)).removeprefix(name)
    files = [file.stat() for file in Path(os.fsdecode(folder)).glob("*.db")]
    assert len(files) >= 4  # two kinds of metrics for each of two fronts
    assert all(512 * file.st_blocks >= file.st_size for file in files)


def test_only_the_engine_loads_torch(server: LiveServer) -> None:
    processes = [server.process.pid, *descendants(server.process.pid)]
    libraries = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in processes}
    assert set(pids(server, "front started")) < set(processes)
    with_torch = [pid for pid in processes if "libtorch" in libraries[pid]]
    assert with_torch == [engine_pid(server)]


def test_versions_are_changed_through_any_front(server: LiveServer) -> None:
    """The key has opted out of learning, and must not appear in any file or command line."""
    server.log_line("worker ready", worker="learner")
    root: Path = server.control.parent  # type: ignore[attr-defined]
    folder = LearnFolder(root / "learn")
    url = f"{server.url}/v1/peagle/drafter"
    assert httpx.post(url, json={"version": 1}, timeout=60).status_code == 401
    add_version(folder, load_folder(root), root, 1, parent=0)
    for number in (1, 0):
        reply = httpx.post(url, json={"version": number}, headers=KEY, timeout=60)
        assert reply.status_code == 200, reply.text

        def is_shown(number: int = number) -> bool:
            shown = httpx.get(url, headers=KEY, timeout=60).json()
            return shown["engines"] == {"engine": number} == {"engine": shown["current"]["number"]}

        wait_for(lambda: all(is_shown() for _ in range(4)))  # from both fronts
    assert list(read_documents(folder)) == []
    written = b"".join(read_file(path) for path in folder.root.rglob("*"))
    commands = [
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(server.process.pid)
    ]
    assert len(commands) >= 6 and not any(b"secret" in text for text in (written, *commands))


def read_file(path: Path) -> bytes:
    """The content of a file, or nothing if it is a folder or was renamed meanwhile."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_killed_front_is_restarted(server: LiveServer) -> None:
    """Connections of the killed front are lost and its requests aborted; others are answered."""
    fronts = pids(server, "front started")
    streams = streams_on_both_fronts(server, fronts)
    os.kill(fronts[0], signal.SIGKILL)
    control(server, "")
    ends = streams.join()
    assert set(ends) <= {"cut", "length"} and 1 <= ends.count("cut") < 8, ends
    until_idle(server)  # The other front answers until the new one is ready.
    wait_for(lambda: short_answer(server) == 200 and len(pids(server, "front started")) == 3)
    wait_for(lambda: both_answer(server))
    assert metric(server, "peagle:engine_restarts_total") == 0


def test_a_killed_engine_is_restarted(server: LiveServer) -> None:
    control(server, "slow 0.3")
    streams = begun_streams(server)
    tokens = metric(server, "vllm:generation_tokens_total")
    os.kill(engine_pid(server), signal.SIGKILL)
    control(server, "")
    assert streams.join() == ["error"] * 8
    wait_for(lambda: httpx.get(f"{server.url}/health", timeout=60).status_code == 200)
    wait_for(lambda: both_answer(server))
    for _ in range(6):
        assert metric(server, "peagle:engine_restarts_total") == 1
        assert metric(server, "vllm:generation_tokens_total") >= tokens > 0


def test_sigterm_finishes_answers_and_ends_all_processes(server: LiveServer) -> None:
    """It ends the server, so it must be the last test of this file."""
    control(server, "slow 0.01")
    streams = begun_streams(server)
    processes = descendants(server.process.pid)
    assert len(processes) >= 6  # the engine, two fronts, and a guard for each
    assert server.stop() == 0
    assert streams.join() == ["length"] * 8
    assert not any(map(is_alive, processes))

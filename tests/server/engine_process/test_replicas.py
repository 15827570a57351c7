"""`peagle serve --replicas 2` as a process: two native engines, one is killed under load."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.errors import UserError
from peagle.learn.engine_load import EngineLoad
from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import read_documents
from peagle.paths import write_json
from peagle.server.engine_process import replica_devices
from peagle.server.engine_process.engine_supervisor import worker_settings
from peagle.server.engine_process.replica_devices import device_environments, visible_gpus
from peagle.server.settings import ServerSettings
from tests.support.models.versions import add_version, load_folder
from tests.support.server.relaying import descendants, is_alive, log_events, running_command
from tests.support.server.serving import tiny_folder
from tests.support.waiting import wait_for

LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}


def test_devices_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    on_cpu = ServerSettings(replicas=3, device="cpu")
    assert visible_gpus("cpu") == []
    assert device_environments(on_cpu, []) == [{"OMP_NUM_THREADS": "2"}] * 3
    gpus = ["4", "6"]
    assert device_environments(ServerSettings(replicas=2), gpus) == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "6", "PEAGLE_COMPILE_PROCESSES": "0"},
    ]
    with pytest.raises(UserError, match="use `replicas` 2, or set `kv_tokens`"):
        device_environments(ServerSettings(replicas=3), gpus)
    assert len(device_environments(ServerSettings(replicas=3, kv_tokens=4096), gpus)) == 3


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(replica_devices, "COUNT_PROGRAM", "print(2)")
    assert visible_gpus("auto") == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert visible_gpus("cuda") == ["4", "6"]
    assert visible_gpus("cuda:1") == ["1"]
    monkeypatch.setattr(replica_devices, "COUNT_PROGRAM", "raise RuntimeError('no driver')")
    with pytest.raises(UserError, match=r"RuntimeError: no driver.*set `device` to cpu or cuda:0"):
        visible_gpus("auto")


def test_settings_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(
        replicas=2, device="cuda:1", api_keys=("secret",), served_model_names=("a",)
    )
    given = worker_settings(settings, {"CUDA_VISIBLE_DEVICES": "1"})
    assert (given.replicas, given.api_keys, given.device) == (None, (), "cuda")
    assert given.served_model_names == ("a",)
    assert worker_settings(settings, {}).device == "cuda:1"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    options = [
        "--drafter",
        str(folder / "p-eagle"),
        "--replicas",
        "2",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    options += ["--served-model-name", "tiny", "-k", "2", "--max-batch", "8", "--kv-tokens", "4096"]
    # prevents training
    write_json(folder / "learn" / "training.json", {"min_documents": 1_000_000})
    options += ["--learn", str(folder / "learn")]
    log = folder / "log"
    with running_command(log, str(folder / "target"), *options) as (process, url):
        wait_for(lambda: ready_workers(url) == 2, 120)
        yield process, url, log


def status(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/peagle/status", timeout=60).json()  # type: ignore[no-any-return]


def ready_workers(url: str) -> int:
    return sum(worker["state"] == "ready" for worker in status(url)["workers"])


class Load:
    """Requests streams one after another on several threads, until `stop`.

    `ends` maps each request id to the end of its stream.
    """

    def __init__(self, url: str, threads: int) -> None:
        self.url = url
        self.stopped = False
        self.ends: dict[str, str] = {}
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self, thread: int) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for i in range(10_000):
                if self.stopped:
                    return
                id = f"load-{thread}-{i}"
                reply = client.post("/v1/completions", json=LONG, headers={"x-request-id": id})
                self.ends[id] = self.end_of(reply)

    def end_of(self, reply: httpx.Response) -> str:
        if reply.status_code != 200:
            return str(reply.status_code)
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        last = json.loads(lines[-2])
        return "error" if "error" in last else str(last["choices"][0]["finish_reason"])

    def stop(self) -> None:
        self.stopped = True
        for thread in self.threads:
            thread.join(timeout=60)


def generated_tokens_by_engine(url: str) -> dict[str, float]:
    """The generated tokens of each engine, from /metrics."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    lines = re.findall(r'^vllm:generation_tokens_total\{engine="([^"]*)".*\} (\S+)$', page, re.M)
    return {engine: float(count) for engine, count in lines}


def test_answers_and_statistics(live: tuple[Any, str, Path]) -> None:
    _, url, _ = live
    texts = set()
    load = Load(url, 4)
    wait_for(lambda: all(generated_tokens_by_engine(url).values()))
    load.stop()
    assert set(load.ends.values()) == {"length"}
    for _ in range(2):
        reply = httpx.post(
            f"{url}/v1/completions", json=LONG | {"stream": False}, timeout=60
        ).json()
        assert reply["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
        texts.add(reply["choices"][0]["text"])
    assert len(texts) == 1
    total = status(url)
    assert total["method"] == "p-eagle" and total["k"] == 2 and len(total["workers"]) == 2
    assert list(generated_tokens_by_engine(url)) == ["p-eagle replica-0", "p-eagle replica-1"]

    def are_equal() -> bool:  # The status of a busy replica may be outdated.
        total = status(url)["engines"]["p-eagle"]["generated_tokens"]
        return sum(generated_tokens_by_engine(url).values()) == total

    wait_for(are_equal)
    shown = httpx.post(
        f"{url}/v1/completions", json=LONG | {"prompt": "w6", "top_p": 7}, timeout=60
    )
    assert shown.status_code == 400 and "top_p" in shown.json()["error"]["message"]


def test_learning_with_two_replicas(live: tuple[Any, str, Path]) -> None:
    """Both replicas store documents and swap drafters; only a killed trainer is restarted."""
    _, url, log = live
    root = log.parent
    folder = LearnFolder(root / "learn")
    wait_for(lambda: count_trainer_events(log, "worker ready") == 1)
    load = Load(url, 4)
    wait_for(lambda: {d.engine for d in read_documents(folder)} == {"replica-0", "replica-1"})
    load.stop()
    add_version(folder, load_folder(root), root, 1, parent=0)
    learner = read_learner_pid(log)
    os.kill(learner, signal.SIGKILL)
    changed = httpx.post(f"{url}/v1/peagle/drafter", json={"version": 1}, timeout=60)
    assert changed.status_code == 200
    assert changed.json()["engines"] == {"replica-0": 1, "replica-1": 1}
    wait_for(lambda: count_trainer_events(log, "worker ready") == 2)
    assert {load.engine for load in EngineLoad.read_all(folder)} == {"replica-0", "replica-1"}
    assert ready_workers(url) == 2


def count_trainer_events(log: Path, event: str) -> int:
    """Count log lines of this event for the trainer."""
    return sum(line.get("worker") == "learner" for line in log_events(log, event))


def read_learner_pid(log: Path) -> int:
    started = [e for e in log_events(log, "worker ready") if e["worker"] == "learner"]
    return int(started[-1]["pid"])


@pytest.mark.slow  # test_engine_process.py covers a killed replica as well.
def test_sigkill_under_load(live: tuple[Any, str, Path]) -> None:
    """Only streams of the killed replica fail, and it is restarted."""
    _, url, log = live
    restarts = status(url)["restarts"]
    load = Load(url, 6)
    victim = status(url)["workers"][0]
    time.sleep(2)
    child = victim["pid"]
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: status(url)["restarts"] == restarts + 1 and ready_workers(url) == 2, 120)
    time.sleep(1)
    load.stop()
    assert not is_alive(child)
    requests = {
        event["request_id"]: event
        for event in log_events(log, "request")
        if "ttft" in event and "path" in event
    }
    workers = {
        id: event["worker"] for id, event in requests.items() if event["path"] == "/v1/completions"
    }
    failed = {id for id, end in load.ends.items() if end != "length"}
    assert {load.ends[id] for id in failed} <= {"error"} and 1 <= len(failed) <= 6, load.ends
    assert {workers[id] for id in failed} == {victim["name"]}
    assert sum(workers.get(id) == "replica-1" for id in load.ends) > 0 and len(load.ends) > len(
        failed
    )
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_the_processes_end_with_a_killed_server(live: tuple[Any, str, Path]) -> None:
    """The last test of this file, as it ends the server. test_http_workers.py sends SIGTERM."""
    process, _, log = live
    pids = descendants(process.pid)
    assert len(pids) >= 4  # a guard and an engine for each replica
    process.kill()
    process.wait(timeout=60)
    wait_for(lambda: not any(map(is_alive, pids)))
    assert "Traceback" not in log.read_text()

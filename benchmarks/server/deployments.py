"""Two replicas of the default pair behind one address: peagle's own, vLLM's data parallel, Ray."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from peagle.catalog import find_pair
from peagle.pull import pull
from tests.support.server.relaying import (
    descendants,
    is_alive,
    log_events,
    running_command,
    wait_for,
)

PAIR = "smollm2-135m"
K = 5
CONTEXT = 2048
START_SECONDS = 400.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
DASHBOARD_PORT = 8465
SERVE_PORT = 8466


class Deployment(Protocol):
    def running(self) -> AbstractContextManager[str]:
        """Start both replicas; the value is their address."""

    def ready(self) -> dict[str, list[int]]:
        """The processes of each replica that answers, by its name."""

    def requests_on(self, replica: str, ids: set[str]) -> set[str] | int:
        """Which of these requests the replica had, or only their number."""


class Replicas:
    """`peagle serve --replicas 2`: the gateway's log line of a request names its worker."""

    options: tuple[str, ...] = ("--replicas", "2", "-k", str(K))

    def __init__(self, python: str) -> None:
        self.python = python
        self.folder = Path(tempfile.mkdtemp(prefix="scale-"))
        self.url = ""
        self.log = self.folder / "log"

    @contextmanager
    def running(self) -> Iterator[str]:
        command = running_command(
            self.log, PAIR, *self.options, seconds=START_SECONDS, **self.environment()
        )
        with command as (_, self.url):
            wait_for(lambda: len(self.ready()) == 2, START_SECONDS)
            yield self.url

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "2"}  # shared by both replicas

    def ready(self) -> dict[str, list[int]]:
        """The processes of each replica that answers."""
        workers = httpx.get(f"{self.url}/v1/peagle/status", timeout=60).json()["workers"]
        return {
            worker["name"]: [worker["pid"], *descendants(worker["pid"])]
            for worker in workers
            if worker["state"] == "ready"
        }

    def requests_on(self, replica: str, ids: set[str]) -> set[str] | int:
        """Which of these requests the replica had, first if another one answered in the end."""
        events = [event for event in log_events(self.log, "request") if event["request_id"] in ids]
        return {event["request_id"] for event in events if event.get("worker") == replica}


class DataParallel(Replicas):
    """`peagle serve --engine vllm --data-parallel-size 2`: metrics count requests by engine."""

    options = (
        "--engine",
        "vllm",
        "--data-parallel-size",
        "2",
        "-k",
        str(K),
        "--dtype",
        "float32",
        "--context",
        str(CONTEXT),
        "--",
        "--enforce-eager",
    )

    def environment(self) -> dict[str, str]:
        return ONE_THREAD | {"PEAGLE_VLLM_PYTHON": self.python}

    def ready(self) -> dict[str, list[int]]:
        """One server holds both engines, so they are ready together."""
        family = [pid for processes in super().ready().values() for pid in processes]
        matches = {pid: re.search(r"EngineCore_(DP\d)", command_line(pid)) for pid in family}
        return {match[1]: [pid, *descendants(pid)] for pid, match in matches.items() if match}

    def requests_on(self, replica: str, ids: set[str]) -> int:
        """The number of its requests, since vLLM's metrics do not name them.

        vLLM counts between its steps: the result is the maximum over one second.
        """
        counts = []
        for _ in range(10):
            time.sleep(0.1)
            counts.append(self.count_requests(replica.removeprefix("DP")))
        return max(counts)

    def count_requests(self, engine: str) -> int:
        metrics = httpx.get(f"{self.url}/metrics", timeout=60).text
        counts = re.findall(
            rf'vllm:num_requests_(?:running|waiting){{engine="{engine}",[^}}]*}} (\S+)', metrics
        )
        return round(sum(map(float, counts)))


class Ray:
    """The files of `peagle deploy ray`, for a CPU: a replica's log names its requests."""

    def __init__(self, python: str) -> None:
        self.bin = Path(python).parent
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self.dashboard = f"http://127.0.0.1:{DASHBOARD_PORT}"
        self.url = f"http://127.0.0.1:{SERVE_PORT}"

    @contextmanager
    def running(self) -> Iterator[str]:
        process = self.start_head()
        try:
            wait_for(lambda: answers(f"{self.dashboard}/api/version"), START_SECONDS)
            url = f"{self.dashboard}/api/serve/applications/"
            httpx.put(url, json=self.application(), timeout=60).raise_for_status()
            models = f"{self.url}/v1/models"
            wait_for(lambda: len(self.ready()) == 2 and answers(models), START_SECONDS)
            yield self.url
        finally:
            family = descendants(process.pid)
            process.terminate()
            process.wait(timeout=60)
            # Ray leaves vLLM's processes running when it ends a replica.
            for pid in filter(is_alive, family):
                os.kill(pid, signal.SIGKILL)

    def start_head(self) -> subprocess.Popen[bytes]:
        command = [str(self.bin / "ray"), "start", "--head", "--block"]
        command += ["--node-ip-address=127.0.0.1", "--port=6465", "--num-cpus=8", "--num-gpus=0"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={DASHBOARD_PORT}"]
        command += ["--disable-usage-stats", "--object-store-memory=200000000"]
        command.append(f"--temp-dir={self.folder / 'ray'}")
        environment = dict(os.environ)
        environment["PATH"] = f"{self.bin}:{environment['PATH']}"
        environment["OMP_NUM_THREADS"] = "1"
        environment.pop("PYTHONPATH", None)
        with (self.folder / "log").open("w") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def application(self) -> dict[str, Any]:
        """The rendered file with local paths and ports, a CPU, float32 and logged requests."""
        files = self.folder / "files"
        command = [sys.executable, "-m", "peagle", "deploy", "ray", PAIR, "--out", str(files)]
        command += ["--replicas", "2", "-k", str(K)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        application: dict[str, Any] = yaml.safe_load((files / "serve.yaml").read_text())
        application["http_options"]["port"] = SERVE_PORT
        config = application["applications"][0]["args"]["llm_configs"][0]
        config["model_loading_config"]["model_source"] = str(pull(find_pair(PAIR)))
        config["accelerator_config"] = {"kind": "cpu"}
        engine = config["engine_kwargs"]
        engine["speculative_config"]["model"] = str(files / "drafter")
        engine |= {
            "max_model_len": CONTEXT,
            "enforce_eager": True,
            "dtype": "float32",
            "enable_log_requests": True,
        }
        config["runtime_env"]["env_vars"] |= ONE_THREAD | {"HF_HUB_OFFLINE": "1"}
        return application

    def ready(self) -> dict[str, list[int]]:
        status = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=60).json()
        deployments = [
            deployment
            for application in status["applications"].values()
            for name, deployment in application["deployments"].items()
            if name.startswith("LLMServer")
        ]
        replicas = [replica for deployment in deployments for replica in deployment["replicas"]]
        return {
            str(replica["pid"]): [replica["pid"], *descendants(replica["pid"])]
            for replica in replicas
            if replica["state"] == "RUNNING"
        }

    def requests_on(self, replica: str, ids: set[str]) -> set[str]:
        logs = (self.folder / "ray" / "session_latest" / "logs").glob(f"worker-*-{replica}.*")
        text = "\n".join(log.read_text(errors="replace") for log in logs)
        return {id for id in ids if id in text}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


DEPLOYMENTS: dict[str, Callable[[str], Deployment]] = {
    "replicas": Replicas,
    "data-parallel": DataParallel,
    "ray": Ray,
}

"""Two replicas of the shipped pair behind one address: our own, vLLM's data parallel, Ray Serve."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from peagle.catalog import find_pair
from peagle.pull import pull
from tests.support.relaying import descendants, is_alive, log_events, running_command, wait_for

PAIR, K, CONTEXT, START = "smollm2-135m", 5, 2048, 400.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Replicas:
    """`peagle serve --replicas 2`: the front's line of a request names its worker."""

    options: tuple[str, ...] = ("--replicas", "2", "-k", str(K))

    def __init__(self, python: str) -> None:
        self.python, self.folder = python, Path(tempfile.mkdtemp(prefix="scale-"))
        self.log = self.folder / "log"

    @contextmanager
    def running(self) -> Iterator[str]:
        with running_command(
            self.log, PAIR, *self.options, seconds=START, **self.environment()
        ) as (
            _,
            self.url,
        ):
            wait_for(lambda: len(self.ready()) == 2, START)
            yield self.url

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "2"}  # shared by both

    def ready(self) -> dict[str, list[int]]:
        """The processes of each replica that answers."""
        workers = httpx.get(f"{self.url}/v1/peagle/status", timeout=60).json()["workers"]
        return {
            w["name"]: [w["pid"], *descendants(w["pid"])] for w in workers if w["state"] == "ready"
        }

    def held(self, replica: str, ids: set[str]) -> set[str]:
        """Those of these requests that this replica had; one that was asked again was with the other one first."""
        told = [line for line in log_events(self.log, "request") if line["request_id"] in ids]
        return {
            t["request_id"]
            for t in told
            if (t.get("worker") == replica) != bool(t.get("asked_again"))
        }


class DataParallel(Replicas):
    """`peagle serve --engine vllm --data-parallel-size 2`: its metrics count requests by engine."""

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
        """One server holds both engines: they are ready together."""
        family = [pid for processes in super().ready().values() for pid in processes]
        named = {pid: re.search(r"EngineCore_(DP\d)", command(pid)) for pid in family}
        return {found[1]: [pid, *descendants(pid)] for pid, found in named.items() if found}

    def held(self, replica: str, ids: set[str]) -> int:  # type: ignore[override]
        """How many it has: vLLM does not tell which, and counts between its steps, so the most of a second."""
        return max(
            self.counted(replica.removeprefix("DP")) for _ in range(10) if not time.sleep(0.1)
        )  # type: ignore[func-returns-value]

    def counted(self, engine: str) -> int:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        counts = re.findall(
            rf'vllm:num_requests_(?:running|waiting){{engine="{engine}",[^}}]*}} (\S+)', page
        )
        return round(sum(map(float, counts)))


class Ray:
    """The files of `peagle deploy ray`, for a CPU: a replica's log names every request that reached it."""

    def __init__(self, python: str) -> None:
        self.bin, self.folder = Path(python).parent, Path(tempfile.mkdtemp(prefix="ray-"))
        self.dashboard, self.url = "http://127.0.0.1:8465", "http://127.0.0.1:8466"

    @contextmanager
    def running(self) -> Iterator[str]:
        head = [
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            "--port=6465",
            "--num-cpus=8",
        ]
        head += [
            "--num-gpus=0",
            "--dashboard-host=127.0.0.1",
            "--dashboard-port=8465",
            "--disable-usage-stats",
        ]
        head += ["--object-store-memory=200000000", f"--temp-dir={self.folder / 'ray'}"]
        environment = os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONPATH", None)
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                [str(self.bin / "ray"), *head], env=environment, stdout=log, stderr=log
            )
        try:
            wait_for(lambda: reached(f"{self.dashboard}/api/version"), START)
            place = f"{self.dashboard}/api/serve/applications/"
            httpx.put(place, json=self.application(), timeout=60).raise_for_status()
            wait_for(lambda: len(self.ready()) == 2 and reached(f"{self.url}/v1/models"), START)
            yield self.url
        finally:
            family = descendants(process.pid)
            process.terminate()
            process.wait(timeout=60)
            for pid in filter(
                is_alive, family
            ):  # Ray lets vLLM's processes go on when it ends a replica
                os.kill(pid, signal.SIGKILL)

    def application(self) -> dict[str, Any]:
        """As it is rendered, but for: this machine's paths and ports, a CPU, float32, requests logged."""
        command = [
            sys.executable,
            "-m",
            "peagle",
            "deploy",
            "ray",
            PAIR,
            "--out",
            str(self.folder / "files"),
        ]
        subprocess.run(
            [*command, "--replicas", "2", "-k", str(K)], check=True, stdout=subprocess.DEVNULL
        )
        read: dict[str, Any] = yaml.safe_load((self.folder / "files" / "serve.yaml").read_text())
        read["http_options"]["port"] = 8466
        config = read["applications"][0]["args"]["llm_configs"][0]
        config["model_loading_config"]["model_source"] = str(pull(find_pair(PAIR)))
        config["accelerator_config"] = {"kind": "cpu"}
        engine = config["engine_kwargs"]
        engine["speculative_config"]["model"] = str(self.folder / "files" / "drafter")
        engine |= {
            "max_model_len": CONTEXT,
            "enforce_eager": True,
            "dtype": "float32",
            "enable_log_requests": True,
        }
        config["runtime_env"]["env_vars"] |= ONE_THREAD | {"HF_HUB_OFFLINE": "1"}
        return read

    def ready(self) -> dict[str, list[int]]:
        told = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=60).json()[
            "applications"
        ]
        found = [
            d
            for app in told.values()
            for name, d in app["deployments"].items()
            if name.startswith("LLMServer")
        ]
        replicas = [replica for deployment in found for replica in deployment["replicas"]]
        return {
            str(r["pid"]): [r["pid"], *descendants(r["pid"])]
            for r in replicas
            if r["state"] == "RUNNING"
        }

    def held(self, replica: str, ids: set[str]) -> set[str]:
        logs = (self.folder / "ray" / "session_latest" / "logs").glob(f"worker-*-{replica}.*")
        text = "\n".join(log.read_text(errors="replace") for log in logs)
        return {id for id in ids if id in text}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def reached(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


ROADS = {"replicas": Replicas, "data-parallel": DataParallel, "ray": Ray}

"""Workers that are servers of this package, with one native engine each.

Each has a GPU, or a share of the CPU's threads, of its own. A worker is started as

    python -m peagle.server.replica_process SETTINGS      (JSON)
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx

from peagle.errors import UserError
from peagle.server.settings import ServerSettings
from peagle.server.workers.launch_spec import LaunchSpec, inherited_environment
from peagle.server.workers.worker import Worker
from peagle.server.workers.worker_status import sum_statuses

# A replica restarts a failed engine by itself; it ends if its device is lost.
UNHEALTHY_TIMEOUT_SECONDS = 60.0


class ReplicaKind:
    status_path = "/v1/peagle/status"

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings

    def launch_specs(self, folder: Path) -> Sequence[LaunchSpec]:
        gpus = visible_gpus(self.settings.device)
        return [
            self._launch_spec(f"replica-{i}", device_environment, folder / f"{i}.sock")
            for i, device_environment in enumerate(device_environments(self.settings, gpus))
        ]

    def _launch_spec(
        self, name: str, device_environment: Mapping[str, str], socket: Path
    ) -> LaunchSpec:
        settings = replace(
            self.settings,
            replicas=None,
            socket=str(socket),
            served_model_names=self.settings.model_names,
            # The replica sees only its own GPU, so an index does not apply.
            device=self.settings.device.partition(":")[0],
            api_keys=(),
            drain_seconds=0,
            log_prompts=False,
        )
        settings_json = json.dumps(asdict(settings))
        return LaunchSpec(
            name,
            command=(sys.executable, "-m", "peagle.server.replica_process", settings_json),
            environment=inherited_environment() | dict(device_environment),
            socket=socket,
            unhealthy_timeout=UNHEALTHY_TIMEOUT_SECONDS,
        )

    def prepare_body(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def status(self, responses: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        statuses = [response.json() for response in responses.values()]
        unknown: dict[str, Any] = {
            "methods": [],
            "method": self.settings.method,
            "k": self.settings.k,
        }
        first = statuses[0] if statuses else unknown
        return {
            "methods": first["methods"],
            "method": first["method"],
            "k": first["k"],
            "engines": sum_statuses([status["engines"] for status in statuses]),
        }


def device_environments(settings: ServerSettings, gpus: Sequence[str]) -> list[dict[str, str]]:
    """For each replica, return the variables that assign it a GPU or a share of the threads."""
    count = settings.replicas or 1
    if gpus and len(gpus) < count and settings.kv_tokens is None:
        raise UserError(
            f"`replicas` is {count}, but there are {len(gpus)} GPUs: use `replicas` {len(gpus)}, or"
            " set `kv_tokens`, each replica's share of a GPU's memory"
        )
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return [{"OMP_NUM_THREADS": str(max(1, threads // count))} for _ in range(count)]


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; [] for a CPU."""
    if device == "cpu":
        return []
    if device.startswith("cuda:"):
        return [device.removeprefix("cuda:")]
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]

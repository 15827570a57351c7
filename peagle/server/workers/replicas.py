"""Workers that are our own server: one native engine each, on a GPU of its own or with its share of the CPU's threads.

python -m peagle.server.replica_process SETTINGS      (JSON) is such a worker.
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
from peagle.server.workers.worker import Launch, Worker, inherited
from peagle.server.workers.worker_status import added

UNWELL = 60.0  # seconds: a worker makes a broken engine again itself, unless the device is broken for good


class Replicas:
    status_path = "/v1/peagle/status"

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings

    def launches(self, folder: Path) -> Sequence[Launch]:
        shares = shares_of(self.settings)
        return [self._launch(i, share, folder / f"{i}.sock") for i, share in enumerate(shares)]

    def _launch(self, i: int, share: dict[str, str], socket: Path) -> Launch:
        names = self.settings.model_names
        device = self.settings.device.partition(":")[0]  # its GPU is the only one it sees
        own = replace(
            self.settings,
            replicas=None,
            socket=str(socket),
            names=names,
            device=device,
            api_keys=(),
            drain_seconds=0,
            log_prompts=False,
        )
        command = (sys.executable, "-m", "peagle.server.replica_process", json.dumps(asdict(own)))
        return Launch(f"replica-{i}", command, inherited() | share, socket, UNWELL)

    def passed_on(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def status(self, replies: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        told = [reply.json() for reply in replies.values()]
        first = (
            told[0]
            if told
            else {"methods": [], "method": self.settings.method, "k": self.settings.k}
        )
        about = {key: first[key] for key in ("methods", "method", "k")}
        return about | {"engines": added([one["engines"] for one in told])}


def shares_of(how: ServerSettings) -> list[dict[str, str]]:
    """For each replica, the environment that gives it its part of the machine."""
    count = how.replicas or 1
    gpus = gpus_of(how.device)
    if gpus and len(gpus) < count and how.kv_tokens is None:
        raise UserError(
            f"--replicas {count} on {len(gpus)} GPUs: use --replicas {len(gpus)}, or say with --kv-tokens how much of"
            " a shared GPU's memory each may take"
        )
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return [{"OMP_NUM_THREADS": str(max(1, threads // count))} for _ in range(count)]


def gpus_of(device: str) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; [] for a CPU."""
    if device == "cpu":
        return []
    if device.startswith("cuda:"):
        return [device.removeprefix("cuda:")]
    import torch

    there = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:there] if visible else [str(i) for i in range(there)]

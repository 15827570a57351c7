"""The device of each engine process: a GPU of its own, or a share of the CPU's threads."""

import os
import subprocess
import sys
from collections.abc import Sequence

from peagle.errors import UserError
from peagle.kernels.compile_processes import PROCESSES_VARIABLE
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.launch_spec import inherited_environment

COUNT_PROGRAM = "import torch; print(torch.cuda.device_count())"


def device_environments(settings: ServerSettings, gpus: Sequence[str]) -> list[dict[str, str]]:
    """For each replica, return the variables that assign it a GPU or a share of the threads.

    Only the first one starts processes that compile kernels; all need the same ones.
    """
    if settings.replicas is None:
        return [{}]
    count = settings.replicas
    if gpus and len(gpus) < count and settings.kv_tokens is None:
        raise UserError(
            f"`replicas` is {count}, but there are {len(gpus)} GPUs: use `replicas` {len(gpus)}, or"
            " set `kv_tokens`, each replica's share of a GPU's memory"
        )
    if gpus:
        environments = [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
        for environment in environments[1:]:
            environment[PROCESSES_VARIABLE] = "0"
        return environments
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return [{"OMP_NUM_THREADS": str(max(1, threads // count))} for _ in range(count)]


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; [] for a CPU."""
    if device == "cpu":
        return []
    if device.startswith("cuda:"):
        return [device.removeprefix("cuda:")]
    count = count_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


def count_gpus() -> int:
    """Ask torch in a process of its own: a process that supervises others does not load it."""
    command = [sys.executable, "-c", COUNT_PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, env=inherited_environment())
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        raise UserError(f"cannot count the GPUs ({reason[0]}): set `device` to cpu or cuda:0")
    return int(result.stdout)

"""How many web server processes a server has unless that is given."""

import os
from contextlib import suppress
from pathlib import Path

NVIDIA_DEVICE = Path("/dev/nvidiactl")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # Of a container: CPU time in a period, period.
MAX_DEFAULT_WORKERS = 4
CORES_PER_WORKER = 4  # Engine, clients and kernels of torch need the others.


def default_http_workers(device: str, engine: str) -> int:
    """One on a CPU, whose engine is slower than any web server; beside a GPU one for four cores.

    A single process streams some 40,000 tokens per second; small pairs on a GPU exceed that.
    """
    if engine != "native" or device == "cpu" or not has_visible_gpu():
        return 1
    return max(1, min(MAX_DEFAULT_WORKERS, usable_cores() // CORES_PER_WORKER))


def has_visible_gpu() -> bool:
    """CUDA_VISIBLE_DEVICES hides all GPUs if it is empty or begins with -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
    return NVIDIA_DEVICE.exists() and not hidden


def usable_cores() -> int:
    """The cores that this process may run on, or fewer if its container has a CPU quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # "max 100000": no quota.
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)

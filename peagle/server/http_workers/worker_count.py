"""How many web server processes a server has unless that is given."""

import os
from pathlib import Path

NVIDIA_DEVICE = Path("/dev/nvidiactl")
MAX_DEFAULT_WORKERS = 4
CORES_PER_WORKER = 4  # Engine, clients and kernels of torch need the others.


def default_http_workers(device: str, engine: str) -> int:
    """One on a CPU, whose engine is slower than any web server; beside a GPU one for four cores.

    A single process streams some 40,000 tokens per second; small pairs on a GPU exceed that.
    """
    if engine != "native" or device == "cpu" or not NVIDIA_DEVICE.exists():
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_DEFAULT_WORKERS, cores // CORES_PER_WORKER))

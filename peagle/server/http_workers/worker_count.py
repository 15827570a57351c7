"""How many web server processes a server has unless that is given."""

from peagle.machine import has_visible_gpu, usable_cores

MAX_DEFAULT_WORKERS = 4
CORES_PER_WORKER = 4  # Engine, clients and kernels of torch need the others.


def default_http_workers(device: str, engine: str) -> int:
    """One on a CPU, whose engine is slower than any web server; beside a GPU one for four cores.

    A single process streams some 40,000 tokens per second; small pairs on a GPU exceed that.
    """
    if engine != "native" or device == "cpu" or not has_visible_gpu():
        return 1
    return max(1, min(MAX_DEFAULT_WORKERS, usable_cores() // CORES_PER_WORKER))

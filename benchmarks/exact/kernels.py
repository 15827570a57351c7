"""Comparing the bits of kernels, and timing them, for products.py and attention.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_graphs import replay_seconds
from peagle.kernels.triton.launch.compile_ahead import compile_ahead

DEVICE = "cuda"
CACHES: list[dict[Any, Any]] = []  # of passes: a dry run leaves zeros there


def compare(jobs: dict[str, Callable[[], Tensor]], expected: Callable[[], Tensor]) -> list[str]:
    """Compile all jobs on several threads, run them, and name those with other bits."""
    device = torch.device(DEVICE)

    def run_all() -> None:
        for job in (expected, *jobs.values()):
            job()

    compile_ahead(run_all, device)
    clear_cached()
    right = expected()
    differing = []
    for name, job in jobs.items():
        try:
            result = job()
        except Exception as error:
            differing.append(f"{name}: {type(error).__name__} {str(error)[:80]}")
            continue
        unequal = int((result != right[: len(result)]).sum())
        if unequal:
            differing.append(f"{name}: {unequal} of {result.numel()}")
    return differing


def clear_cached() -> None:
    for cache in CACHES:
        cache.clear()


def microseconds(runs: list[Callable[[], object]]) -> float:
    """The mean time of one of several runs, in one CUDA graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return round(1e6 * replay_seconds(graph, 5) / len(runs), 2)

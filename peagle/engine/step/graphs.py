"""Graphs: CUDA graphs by key, for work of a fixed shape."""

import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

WARM_UP_RUNS = 1  # Before a capture, to load kernels and to allocate workspaces.
# Engines capture one after the other: PyTorch has one stream for all captures of a process.
CAPTURE_LOCK = threading.Lock()


class Graphs:
    """CUDA graphs that share one memory pool. Each replay overwrites the graph's own outputs."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Any] = {}
        self.outputs: dict[Hashable, Any] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self.graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Replay the graph of this key; do the work if there is none."""
        if key not in self.graphs:
            return work()
        self.graphs[key].replay()
        return self.outputs[key]

    def warm_up(self, work: Callable[[], Any]) -> None:
        stream = warm_up_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with CAPTURE_LOCK, torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, key: Hashable, work: Callable[[], Any]) -> bool:
        """Capture the work as a graph.

        Returns False if the work synchronizes with the host, as some mixtures of experts do.
        """
        if key in self.graphs:
            return True
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)
        try:
            # Another thread may allocate the memory of another engine meanwhile.
            capturing = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
            with CAPTURE_LOCK, capturing:
                self.outputs[key] = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        self.graphs[key] = graph
        return True

    def milliseconds(self, key: Hashable, repeats: int = 30) -> float | None:
        """The mean time of one replay; None if there is no such graph."""
        if key not in self.graphs:
            return None
        self.graphs[key].replay()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            self.graphs[key].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats


@cache
def warm_up_stream(device: int) -> Any:
    """One stream for the warm-ups of all engines: the matrix library keeps a workspace for each."""
    return torch.cuda.Stream(device)

"""CUDA graphs by key: work of a fixed shape, launched as one."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

WARM_UPS = 2  # before a capture: kernels are compiled and workspaces allocated in them


class Graphs:
    """All share one pool of memory. What a graph returned stays where it is, and each replay fills it anew."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Any] = {}
        self.outputs: dict[Hashable, Any] = {}
        self.side: Any = (
            None  # the stream of warm-ups: one, for the matrix library keeps memory for each
        )

    def __contains__(self, key: Hashable) -> bool:
        return key in self.graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Replays the graph of this key; without one, does the work."""
        if key not in self.graphs:
            return work()
        self.graphs[key].replay()
        return self.outputs[key]

    def warm(self, work: Callable[[], Any]) -> None:
        stream = self.side = self.side or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, key: Hashable, work: Callable[[], Any]) -> bool:
        """False: the work asks the host in between (as some mixtures of experts do), and cannot be a graph."""
        if key in self.graphs:
            return True
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool):
                self.outputs[key] = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        self.graphs[key] = graph
        return True

    def milliseconds(self, key: Hashable, repeats: int = 30) -> float | None:
        """Of one replay, after another; None if there is no such graph."""
        if key not in self.graphs:
            return None
        self.graphs[key].replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            self.graphs[key].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

"""The time of CUDA graphs."""

import torch


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int = 10) -> float:
    """The mean time of one replay, after one that is not counted."""
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats

"""How many threads the C kernels use, and PyTorch beside them.

A step consists of C kernels, which have threads of their own (c/pool.c), and of small operations of
PyTorch. If PyTorch starts its threads for one of those, they take the cores: its OpenMP threads
spin for milliseconds after each operation, or must be woken, which takes as long as the operation.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_reserved = threading.local()  # `count`: threads of the kernels that this thread calls


def kernel_threads() -> int:
    return getattr(_reserved, "count", None) or torch.get_num_threads()


@contextmanager
def threads_for_kernels(enabled: bool = True) -> Iterator[None]:
    """In this block the threads belong to the C kernels, and PyTorch computes on one."""
    count = torch.get_num_threads()
    if not enabled or count == 1:
        yield
        return
    _reserved.count = count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _reserved.count = None

"""Create modules on the meta device without the values that they begin with.

transformers creates a model on the meta device before it loads the weights. torch computes the
shapes of random values and of ranges there with a library for symbolic math, whose import takes as
long as loading a small model. Random values are left out here, and ranges, of which RoPE computes
its frequencies, are created on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

RANDOM_FUNCTIONS = ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_")


@contextmanager
def no_meta_initialization() -> Iterator[None]:
    originals = {name: getattr(nn.init, name) for name in RANDOM_FUNCTIONS}
    arange = torch.arange

    def arange_on_cpu(*args: Any, device: Any = "cpu", **options: Any) -> Tensor:
        return arange(*args, device=device, **options)

    for name, function in originals.items():
        setattr(nn.init, name, skip_meta(function))
    torch.arange = arange_on_cpu
    try:
        yield
    finally:
        torch.arange = arange
        for name, function in originals.items():
            setattr(nn.init, name, function)


def skip_meta(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def initialize(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        return tensor if tensor.is_meta else function(tensor, *args, **options)

    return initialize

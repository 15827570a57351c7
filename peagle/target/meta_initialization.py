"""Create modules on the meta device without the values that they begin with.

transformers creates a model on the meta device before it loads the weights. torch computes the
shapes of random values and of ranges there with a library for symbolic math, whose import takes as
long as loading a small model. Random values are left out here. Ranges and lists of numbers, of
which RoPE computes its frequencies, are created on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

RANDOM_FUNCTIONS = ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_")
VALUE_FUNCTIONS = ("arange", "tensor")


@contextmanager
def no_meta_initialization() -> Iterator[None]:
    list_constructors()
    functions = [(nn.init, name, skip_meta) for name in RANDOM_FUNCTIONS]
    functions += [(torch, name, create_on_cpu) for name in VALUE_FUNCTIONS]
    originals = [getattr(module, name) for module, name, _ in functions]
    for (module, name, change), original in zip(functions, originals, strict=True):
        setattr(module, name, change(original))
    try:
        yield
    finally:
        for (module, name, _), original in zip(functions, originals, strict=True):
            setattr(module, name, original)


def list_constructors() -> None:
    """Let torch list the functions that obey `with torch.device(...)`, which it does once.

    At a first use while some are replaced, it would never know the original ones.
    """
    with torch.device("cpu"):
        torch.empty(0)


def skip_meta(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def initialize(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        return tensor if tensor.is_meta else function(tensor, *args, **options)

    return initialize


def create_on_cpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def create(*args: Any, device: Any = None, **options: Any) -> Tensor:
        # transformers creates [] to find the current device.
        is_probe = len(args) == 1 and isinstance(args[0], list) and not args[0]
        if device is None and not is_probe:
            device = "cpu"
        return function(*args, device=device, **options)

    return create

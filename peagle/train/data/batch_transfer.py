"""A tree of small integer tensors (dataclasses and tuples), moved to the device as one buffer in one transfer."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a tensor was."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A tree without its tensors, and all their numbers in one: cheap to send to another process or device."""

    tree: Any
    numbers: Tensor  # int32

    def to(self, device: torch.device | str) -> Any:
        """The tree again, its tensors views of one buffer on the device."""
        buffer = self.numbers
        if str(device).startswith("cuda"):
            buffer = buffer.pin_memory()
        return _filled(self.tree, buffer.to(device, non_blocking=True))


def flatten(tree: Any) -> FlatBatch:
    leaves: list[Tensor] = []
    hollow = _hollow(tree, leaves, 0)[0]
    return FlatBatch(hollow, torch.cat([leaf.reshape(-1) for leaf in leaves]))


def _hollow(x: Any, leaves: list[Tensor], start: int) -> tuple[Any, int]:
    if isinstance(x, Tensor):
        assert x.dtype == torch.int32, x.dtype
        leaves.append(x)
        return Hole(start, tuple(x.shape)), start + x.numel()
    if isinstance(x, tuple) or is_dataclass(x):
        parts = []
        for part in x if isinstance(x, tuple) else [getattr(x, f.name) for f in fields(x)]:
            part, start = _hollow(part, leaves, start)
            parts.append(part)
        kind: Any = type(x)
        return (tuple(parts) if isinstance(x, tuple) else kind(*parts)), start
    return x, start


def _filled(x: Any, buffer: Tensor) -> Any:
    if isinstance(x, Hole):
        size = torch.Size(x.shape).numel()
        return buffer[x.start : x.start + size].view(x.shape)
    if isinstance(x, tuple):
        return tuple(_filled(part, buffer) for part in x)
    if is_dataclass(x):
        kind: Any = type(x)
        return kind(*(_filled(getattr(x, f.name), buffer) for f in fields(x)))
    return x

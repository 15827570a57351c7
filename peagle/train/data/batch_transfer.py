"""One transfer for a whole batch: its small integer tensors move to the device as one buffer."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a tensor lies in the buffer; it stands for the tensor in the structure."""

    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A structure of dataclasses and tuples whose tensors lie in one buffer.

    It is cheap to send to another process or device.
    """

    structure: Any  # a TensorSpec in place of every tensor
    buffer: Tensor  # int32

    def to(self, device: torch.device | str) -> Any:
        """Restore the structure; its tensors are views of one buffer on the device."""
        buffer = self.buffer
        if str(device).startswith("cuda"):
            buffer = buffer.pin_memory()
        return _restore_tensors(self.structure, buffer.to(device, non_blocking=True))


def flatten(batch: Any) -> FlatBatch:
    """Collect the int32 tensors of nested dataclasses and tuples in one buffer."""
    tensors: list[Tensor] = []
    structure = _extract_tensors(batch, tensors, 0)[0]
    return FlatBatch(structure, torch.cat([tensor.reshape(-1) for tensor in tensors]))


def _extract_tensors(node: Any, tensors: list[Tensor], offset: int) -> tuple[Any, int]:
    """Append the tensors of `node` to `tensors`; return `node` with specs and the next offset."""
    if isinstance(node, Tensor):
        assert node.dtype == torch.int32, node.dtype
        tensors.append(node)
        return TensorSpec(offset, tuple(node.shape)), offset + node.numel()
    if isinstance(node, tuple) or is_dataclass(node):
        children = []
        for child in _children(node):
            child, offset = _extract_tensors(child, tensors, offset)
            children.append(child)
        return _rebuild(node, children), offset
    return node, offset


def _restore_tensors(node: Any, buffer: Tensor) -> Any:
    if isinstance(node, TensorSpec):
        size = torch.Size(node.shape).numel()
        return buffer[node.offset : node.offset + size].view(node.shape)
    if isinstance(node, tuple) or is_dataclass(node):
        return _rebuild(node, [_restore_tensors(child, buffer) for child in _children(node)])
    return node


def _children(node: Any) -> list[Any]:
    return list(node) if isinstance(node, tuple) else [getattr(node, f.name) for f in fields(node)]


def _rebuild(node: Any, children: list[Any]) -> Any:
    kind: Any = type(node)
    return tuple(children) if kind is tuple else kind(*children)

"""Keys and values of every layer, by slot: what pages are made of.

A page holds `size` consecutive positions of one request, of the target's layers and of the drafter's alike; position j
of a request lies in slot table[j // size] * size + j % size. One page more than the allocator hands out takes what
belongs nowhere.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from peagle.kernels.triton.compact_kv import compact_kv
from peagle.kernels.triton.paged_attention import new_split_counters


@dataclass(frozen=True, slots=True)
class KVShape:
    """One layer's keys: so many heads of so many numbers."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Keys and values of one position."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    def __init__(
        self,
        shapes: list[KVShape],
        pages: int,
        size: int,
        device: torch.device,
        target: int | None = None,
    ) -> None:
        """`target`: so many layers are the target's; None: all. Layers alike lie side by side."""
        self.pages, self.size = pages, size
        slots = (pages + 1) * size
        self.nowhere = pages * size  # the first slot of the page that is nobody's
        self.arrived = new_split_counters(device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.moved: list[
            Tensor
        ] = []  # [2 * layers, slots, width]: the target's keys, then its values
        whose = [(shape, target is None or i < target) for i, shape in enumerate(shapes)]
        for (shape, own), alike in groupby(whose):
            count, width = len(list(alike)), shape.kv_heads * shape.head_dim
            # zeros: a masked key is still multiplied, by zero
            block = torch.zeros(2 * count, slots, width, dtype=shape.dtype, device=device)
            heads = block.unflatten(2, (shape.kv_heads, shape.head_dim)).unbind()
            self.keys += heads[:count]
            self.values += heads[count:]
            self.moved += [block] if own else []

    def settle(self, first: Tensor, kept: Tensor, path: Tensor, tables: Tensor) -> None:
        """The target's keys and values of an accepted path, to where a chain's would lie."""
        for block in self.moved:
            compact_kv(block, first, kept, path, tables, self.size)

    def renew(self, pages: list[int]) -> None:
        """Pages that get a new owner. On a CPU whole pages are read, also behind what their owner has written."""
        if self.keys[0].device.type == "cpu":
            self.clear(pages)

    def clear(self, pages: list[int]) -> None:
        """Zeros: a masked key is still multiplied, and what is left in a page need not be a number."""
        if pages:
            at = torch.tensor(pages, device=self.keys[0].device)
            for cache in (*self.keys, *self.values):
                cache.unflatten(0, (-1, self.size))[at] = 0

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values [T, kv_heads, head_dim] to slots [T]; a negative slot: nowhere."""
        at = slots.long()
        at = torch.where(at < 0, self.nowhere, at)
        self.keys[layer][at] = keys
        self.values[layer][at] = values

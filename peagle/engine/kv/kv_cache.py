"""KVCache: the keys and values of every layer, in pages.

A page holds `page_size` consecutive positions of one request, for the layers of the target and of
the drafter alike. Position j of a request lies in KV slot
page_table[j // page_size] * page_size + j % page_size. One page beyond those that the allocator
hands out takes the rows that are not stored.
"""

import math
import mmap
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from peagle.engine.device import to_device
from peagle.kernels.triton.attention.attention_plan import new_split_counters
from peagle.kernels.triton.compact_kv import compact_kv


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one layer's keys, and of its values."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of one position."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


def new_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU memory is used from the first write on, page by page.

    torch.zeros writes all of them: 1.5 GB for the positions that a server of SmolLM2-135M has, of
    which one request needs few. (np.zeros does not, but asks for pages of 2 MB.)
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    is_unix = hasattr(mmap, "MAP_PRIVATE")
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_unix else {}
    try:
        memory = mmap.mmap(-1, size, **options)
    except OSError as error:
        raise torch.OutOfMemoryError(f"not enough memory for {size:,} bytes") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVCache:
    def __init__(
        self,
        shapes: list[KVShape],
        num_pages: int,
        page_size: int,
        device: torch.device,
        target_layers: int | None = None,
    ) -> None:
        """`target_layers`: the number of first layers that are the target's; None: all."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.discard_page = num_pages  # The extra page.
        self.discard_slot = num_pages * page_size
        num_slots = (num_pages + 1) * page_size
        self.arrived = new_split_counters(device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # [2 * layers, slots, width]: the target's keys, then its values, of layers of one shape.
        self.target_blocks: list[Tensor] = []
        layers = [
            (shape, target_layers is None or i < target_layers) for i, shape in enumerate(shapes)
        ]
        for (shape, is_target), group in groupby(layers):
            count = len(list(group))
            width = shape.kv_heads * shape.head_dim
            # Zeros, because a masked key is still multiplied (by zero).
            block = new_zeros((2 * count, num_slots, width), shape.dtype, device)
            heads = block.unflatten(2, (shape.kv_heads, shape.head_dim)).unbind()
            self.keys += heads[:count]
            self.values += heads[count:]
            if is_target:
                self.target_blocks.append(block)

    def compact_path(self, first: Tensor, accepted: Tensor, path: Tensor, tables: Tensor) -> None:
        """Move the target's keys and values of an accepted path to the positions of a chain."""
        for block in self.target_blocks:
            compact_kv(block, first, accepted, path, tables, self.page_size)

    def reset_pages(self, pages: list[int], unverified: list[int]) -> None:
        """Prepare pages for a new owner; `unverified`: those of them that may hold NaN.

        CPU attention reads whole pages, also beyond the positions that their owner has written. On
        a GPU a pass reads as far as its last row, and rows beyond the context are not written.
        """
        self.zero_pages(pages if self.keys[0].device.type == "cpu" else unverified)

    def zero_pages(self, pages: list[int]) -> None:
        """Overwrite pages with zeros: a masked key is still multiplied, and NaN * 0 is NaN."""
        if pages:
            index = to_device(torch.tensor(pages), self.keys[0].device)
            for cache in (*self.keys, *self.values):
                cache.unflatten(0, (-1, self.page_size))[index] = 0

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys, values [T, kv_heads, head_dim] to slots [T]; -1 discards a row."""
        index = slots.long()
        index = torch.where(index < 0, self.discard_slot, index)
        self.keys[layer][index] = keys
        self.values[layer][index] = values

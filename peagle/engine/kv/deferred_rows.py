"""DeferredRows: rows of the drafter that wait for its next pass, where steps draft nothing.

The drafter's KV cache needs a row for every position of the target. A step without drafts adds few
rows, and a pass reads all weights of the drafter for them. So on a CPU they wait until the drafter
drafts again, or until a page is full: full pages may be shared, with the drafter's keys in them.

    page size 64, no drafts from position 60 on:

    position     60    61       62          63          64
    waiting      60    60 61    60 61 62    none        64
    pass                                    60 .. 63

On a GPU nothing waits: a step is a CUDA graph with a fixed number of rows.
"""

import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import new_zeros
from peagle.kernels.triton.expand_rows import VerifiedBlock


class DeferredRows:
    def __init__(self, slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.counts = torch.zeros(slots, dtype=torch.int32)  # Waiting rows of each slot.
        self.ids = torch.zeros(slots, 0, dtype=torch.long)  # The token that each row reads.
        self.hidden = torch.zeros(slots, 0, 0)  # [slots, rows, taps * d]

    def clear(self, slot: int) -> None:
        """Drop the rows of the request that was in this slot."""
        self.counts[slot] = 0

    def next_block(self, index: Tensor, block: VerifiedBlock, drafts: bool) -> VerifiedBlock | None:
        """What the drafter runs behind a step: this block, behind the rows that wait.

        None: the rows of the block wait, too. `index` [B]: the slots of its requests; `drafts`:
        whether the drafter drafts.
        """
        if drafts and not self.counts[index].any():
            return block
        self._add(index, block)
        lengths = block.first_positions + block.accepted_counts + 1
        if drafts or self._fill_a_page(index, lengths):
            return self._take(index, block, lengths)
        return None

    def _add(self, index: Tensor, block: VerifiedBlock) -> None:
        """Append the accepted rows of a block."""
        rows = torch.arange(block.ids.shape[1])
        accepted = block.accepted_counts[:, None]
        self._reserve(len(rows), block.hidden)
        is_real = rows <= accepted  # [B, R]
        slot = index[:, None].expand_as(is_real)[is_real]
        column = (self.counts[index][:, None] + rows)[is_real]
        # The row at a position reads the token behind it.
        ids = torch.where(rows == accepted, block.newest[:, None], block.ids.roll(-1, 1))
        self.ids[slot, column] = ids[is_real]
        self.hidden[slot, column] = block.hidden.unflatten(0, is_real.shape)[is_real]
        self.counts[index] += block.accepted_counts + 1

    def _reserve(self, rows: int, hidden: Tensor) -> None:
        """Make room for `rows` more of each slot. Less than a page of them waits already."""
        size = self.page_size - 1 + rows
        slots, reserved = self.ids.shape
        if size <= reserved:
            return
        old = self.ids, self.hidden
        self.ids = torch.zeros(slots, size, dtype=torch.long)
        self.hidden = new_zeros((slots, size, hidden.shape[1]), hidden.dtype, hidden.device)
        if reserved:
            self.ids[:, :reserved], self.hidden[:, :reserved] = old

    def _fill_a_page(self, index: Tensor, lengths: Tensor) -> bool:
        """Whether the rows of one of these slots reach the end of a page."""
        starts = lengths - self.counts[index]
        return bool((lengths // self.page_size > starts // self.page_size).any())

    def _take(self, index: Tensor, block: VerifiedBlock, lengths: Tensor) -> VerifiedBlock:
        """All rows of these slots as one block; none waits any more."""
        counts = self.counts[index]
        rows = int(counts.max())
        self.counts[index] = 0
        return block._replace(
            # Row i of a block reads the token in column i + 1, the last one `newest`.
            ids=self.ids[index, :rows].roll(1, 1),
            hidden=self.hidden[index, :rows].flatten(0, 1),
            first_positions=lengths - counts,
            accepted_counts=counts - 1,
        )

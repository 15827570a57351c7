"""DecodeSlots: the device-side state of the requests that decode, one slot for each.

A step reads and writes it without the host. Of the request in a slot, positions 0..lengths-1 are
computed, `newest` is the token after them, and `trees` holds the drafts that come next: a chain,
and a tree where one was drafted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.device import to_device
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.engine.ngram.ngram_slots import NgramSlots
from peagle.kernels.row_pass import RowPass
from peagle.kernels.slot_state import SlotState
from peagle.kernels.triton.build_tree import DraftTrees
from peagle.kernels.triton.gather_rows import GatheredRows, gather_rows

MAX_RANDOM_CONTEXT = 1024  # of slots that are filled to be timed


class PageTableUpdate(NamedTuple):
    """New pages of the request in a slot."""

    slot: int
    end: int  # Rows from this position on are not stored.
    pages: list[int]


class DecodeSlots:
    def __init__(
        self,
        count: int,
        max_shape: DraftShape,
        positions: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """`positions`: the length of the longest request, drafts included."""
        self.count = count
        self.padding_slot = count  # One slot more, of no request, fills a batch up.
        self.page_size = page_size
        self.device = device
        table_width = -(-positions // page_size)
        rows = count + 1
        self.tables = torch.zeros(rows, table_width, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        # Rows from this position on are not stored.
        self.ends = torch.zeros(rows, dtype=torch.int32, device=device)
        self.emitted = torch.zeros(rows, dtype=torch.int32, device=device)
        self.newest = torch.zeros(rows, dtype=torch.long, device=device)
        self.trees = empty_trees(rows, max_shape, device)
        self.ngram: NgramSlots | HostNgramSlots | None = (
            None  # Where requests draft by prompt lookup.
        )
        self._free = list(range(count))[::-1]

    def keep_tokens(self, min_match: int) -> None:
        """Keep the tokens of every request, for prompt lookup (engine/ngram/ngram_slots.py)."""
        rows, k = self.trees.chain.shape
        # A step at the end of a request writes its tokens behind the last position.
        positions = self.tables.shape[1] * self.page_size + k + 1
        if self.device.type == "cpu":
            self.ngram = HostNgramSlots(rows, k, positions, min_match)
        else:
            self.ngram = NgramSlots(rows, k, positions, min_match, self.device)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def allocate(self) -> int:
        """Return a free slot. Its device state is still that of the request before."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def upload(
        self, values: list[int] | list[list[int]], dtype: type[np.integer] = np.int64
    ) -> Tensor:
        """Copy numbers to the device without waiting for it.

        numpy reads lists three times as fast as torch does.
        """
        return to_device(torch.from_numpy(np.array(values, dtype)), self.device)

    def write_tables(self, updates: list[PageTableUpdate], discard_page: int) -> None:
        """Write the page tables of several slots in one transfer, padded with `discard_page`."""
        if not updates:
            return
        width = self.tables.shape[1]
        rows = [
            [slot, end, *pages, *[discard_page] * (width - len(pages))]
            for slot, end, pages in updates
        ]
        uploaded = self.upload(rows, np.int32)
        index = uploaded[:, 0].long()
        self.ends[index] = uploaded[:, 1]
        self.tables[index] = uploaded[:, 2:]

    @property
    def state(self) -> SlotState:
        return SlotState(self.tables, self.lengths, self.ends, self.emitted, self.newest)

    def verify_rows(self, index: Tensor, shape: DraftShape) -> tuple[GatheredRows, RowPass]:
        """Gather the newest token and the drafts of the slots in `index` [B] for one pass."""
        gathered = gather_rows(index, shape, self.page_size, self.state, self.trees)
        return gathered, gathered.row_pass(self.page_size, shape.k)

    # --- measurements -----------------------------------------------------------------------------

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the state of every slot at the end."""
        tensors = [*self.state, *self.trees]
        if self.ngram is not None:
            tensors += self.ngram.tensors
        copies = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

    def fill_random(self, vocab_size: int, discard_page: int) -> None:
        """Give every slot random tokens at a random position, over pages of no request.

        Rows that are alike would choose the same experts, and their pass would look too cheap.
        """
        generator = torch.Generator().manual_seed(0)

        def fill(tensor: Tensor, limit: int) -> None:
            values = torch.randint(limit, tensor.shape, generator=generator)
            tensor.copy_(values.to(tensor.dtype))

        for ids in (self.newest, self.trees.chain, self.trees.nodes):
            fill(ids, vocab_size)
        capacity = self.tables.shape[1] * self.page_size
        fill(self.lengths, max(1, min(MAX_RANDOM_CONTEXT, capacity // 2)))
        self.tables.fill_(discard_page)


def empty_trees(slots: int, max_shape: DraftShape, device: torch.device) -> DraftTrees:
    """Chains of token 0, one for each slot: the padding slot must hold a valid tree as well."""
    num_nodes = 0 if max_shape.is_chain else max_shape.nodes
    nodes = torch.arange(num_nodes, dtype=torch.int32, device=device)
    chain = torch.zeros(slots, max(max_shape.k, 1), dtype=torch.long, device=device)
    masks = (torch.ones(len(nodes) + 1, dtype=torch.long, device=device) << 1).cumprod(0) - 1
    ids = torch.zeros(slots, len(nodes), dtype=torch.long, device=device)
    parents, depths, masks = (x.expand(slots, -1).contiguous() for x in (nodes, nodes + 1, masks))
    return DraftTrees(chain, ids, parents, depths, masks)

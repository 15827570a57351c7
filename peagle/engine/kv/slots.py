"""Where requests sit while they decode: the state of each place, on the device.

A step reads and writes it without the host. Positions 0..lengths-1 of a place's request are computed, `newest` is the
token after them, `trees` what the drafter says comes next: a chain, and a tree where one was made.
"""

import numpy as np
import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.sampling.sampling_state import to_device
from peagle.kernels.row_pass import RowPass
from peagle.kernels.slot_state import SlotState
from peagle.kernels.triton.build_tree import DraftTrees
from peagle.kernels.triton.gather_rows import GatheredRows, gather_rows


class DecodeSlots:
    def __init__(
        self, count: int, largest: DraftShape, positions: int, page: int, device: torch.device
    ) -> None:
        """One place more than asked for is nobody's: it fills a batch up."""
        self.count, self.page, self.device = count, page, device
        pages = -(-positions // page)
        rows = count + 1
        self.tables = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends = torch.zeros(
            rows, dtype=torch.int32, device=device
        )  # rows from this position on are not stored
        self.emitted = torch.zeros(rows, dtype=torch.int32, device=device)
        self.newest = torch.zeros(rows, dtype=torch.long, device=device)
        self.trees = empty_trees(rows, largest, device)
        self._free = list(range(count))[::-1]

    @property
    def state(self) -> SlotState:
        return SlotState(self.tables, self.lengths, self.ends, self.emitted, self.newest)

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        """A free place: of its request nothing is known there yet."""
        return self._free.pop()

    def leave(self, place: int) -> None:
        assert place not in self._free
        self._free.append(place)

    def upload(
        self, values: list[int] | list[list[int]], dtype: type[np.integer] = np.int64
    ) -> Tensor:
        """From the host, without waiting for the device. By numpy, which reads lists three times as fast."""
        return to_device(torch.from_numpy(np.array(values, dtype)), self.device)

    def write(self, known: list[tuple[int, int, list[int]]], nowhere: int) -> None:
        """Of each (place, end, pages): in one transfer. Behind the pages comes the one that is nobody's."""
        if not known:
            return
        width = self.tables.shape[1]
        rows = [
            [place, end, *pages, *[nowhere] * (width - len(pages))] for place, end, pages in known
        ]
        there = self.upload(rows, np.int32)
        at = there[:, 0].long()
        self.ends[at], self.tables[at] = there[:, 1], there[:, 2:]

    def rows(self, at: Tensor, tree: DraftShape) -> tuple[GatheredRows, RowPass]:
        """A pass over the newest token and the drafts of each place in `at` [B]."""
        taken = gather_rows(at, tree, self.page, self.state, self.trees)
        return taken, taken.row_pass(self.page)


def empty_trees(places: int, largest: DraftShape, device: torch.device) -> DraftTrees:
    """Chains of token 0: what nobody's place holds must be a tree as well."""
    nodes = torch.arange(0 if largest.chain else largest.nodes, dtype=torch.int32, device=device)
    chain = torch.zeros(places, max(largest.k, 1), dtype=torch.long, device=device)
    masks = (torch.ones(len(nodes) + 1, dtype=torch.long, device=device) << 1).cumprod(0) - 1
    shape = (places, -1)
    ids = torch.zeros(places, len(nodes), dtype=torch.long, device=device)
    return DraftTrees(
        chain, ids, *(x.expand(shape).contiguous() for x in (nodes, nodes + 1, masks))
    )

"""Where requests sit while they decode: the state of each place, on the device.

A step reads and writes it without the host. Positions 0..lengths-1 of a place's request are computed, `newest` is the
token after them, `drafts` what the drafter says comes next.
"""

import torch
from torch import Tensor

from peagle.engine.history import move
from peagle.engine.rowpass import RowPass
from peagle.kernels.take import Taken, take


class Places:
    def __init__(self, count: int, k: int, positions: int, page: int, device: torch.device) -> None:
        """One place more than asked for is nobody's: it fills a batch up."""
        self.count, self.page, self.device = count, page, device
        pages = -(-positions // page)
        rows = count + 1
        self.tables = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends = torch.zeros(rows, dtype=torch.int32, device=device)  # rows from this position on are not stored
        self.emitted = torch.zeros(rows, dtype=torch.int32, device=device)
        self.newest = torch.zeros(rows, dtype=torch.long, device=device)
        self.drafts = torch.zeros(rows, max(k, 1), dtype=torch.long, device=device)
        self._free = list(range(count))[::-1]

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        """A free place: of its request nothing is known there yet."""
        return self._free.pop()

    def leave(self, place: int) -> None:
        assert place not in self._free
        self._free.append(place)

    def upload(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        """From the host, without waiting for the device."""
        return move(torch.tensor(values, dtype=dtype), self.device)

    def write(self, known: list[tuple[int, int, list[int]]], nowhere: int) -> None:
        """Of each (place, end, pages): in one transfer. Behind the pages comes the one that is nobody's."""
        if not known:
            return
        width = self.tables.shape[1]
        rows = [[place, end, *pages, *[nowhere] * (width - len(pages))] for place, end, pages in known]
        there = self.upload(rows, torch.int32)
        at = there[:, 0].long()
        self.ends[at], self.tables[at] = there[:, 1], there[:, 2:]

    def rows(self, at: Tensor, width: int) -> tuple[Taken, RowPass]:
        """A pass over the newest token and width - 1 drafts of each place in `at` [B]."""
        taken = take(at, width, self.page, self.tables, self.lengths, self.ends, self.newest, self.drafts)
        _, positions, slots, tables, starts, counts, first, _ = taken
        return taken, RowPass(positions, slots, tables, starts, counts, first, width, self.page)

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

    def take(self, nowhere: int) -> int:
        """A free place, whose table points to the page that is nobody's until its own are known."""
        place = self._free.pop()
        self.tables[place] = nowhere
        return place

    def leave(self, place: int) -> None:
        assert place not in self._free
        self._free.append(place)

    def upload(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        """From the host, without waiting for the device."""
        return move(torch.tensor(values, dtype=dtype), self.device)

    def set_table(self, place: int, pages: list[int], start: int = 0) -> None:
        """The pages of a place from the `start`-th on."""
        if pages[start:]:
            self.tables[place, start : len(pages)] = self.upload(pages[start:], torch.int32)

    def rows(self, at: Tensor, width: int) -> tuple[Taken, RowPass]:
        """A pass over the newest token and width - 1 drafts of each place in `at` [B]."""
        taken = take(at, width, self.page, self.tables, self.lengths, self.ends, self.newest, self.drafts)
        _, positions, slots, tables, starts, counts, first, _ = taken
        return taken, RowPass(positions, slots, tables, starts, counts, first, width, self.page)

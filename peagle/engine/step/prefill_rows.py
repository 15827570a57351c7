"""The rows of a prefill pass: positions, KV slots and page tables.

Requests share the pages of a prefix as soon as the pass that fills them is planned (scheduler.py):
a request may read keys that another one stores in the same pass.
"""

import torch
from torch import Tensor

from peagle.engine.schedule.prefill_layout import PrefillInput, PrefillSize
from peagle.kernels.row_pass import RowPass


def target_rows(inputs: PrefillInput, tables: Tensor, size: PrefillSize, page_size: int) -> RowPass:
    """The rows of the target's pass; `tables` [N, P]: the page tables of the requests."""
    request = inputs.owner.clamp(min=0)
    stored = inputs.owner >= 0
    return RowPass(
        inputs.positions,
        kv_slots(request, inputs.positions, stored, tables, page_size),
        tables,
        inputs.start.int(),
        inputs.count.int(),
        inputs.first.int(),
        size.max_rows,
        page_size,
        reads_new_keys=True,
    )


def draft_rows(
    inputs: PrefillInput, tables: Tensor, size: PrefillSize, ends: Tensor, page_size: int
) -> RowPass:
    """The rows of the drafter's pass. Rows from position `ends` [N] on are not stored."""
    positions = inputs.draft_positions
    request = inputs.draft_owner.clamp(min=0)
    stored = inputs.draft_owner >= 0
    stored &= positions < ends[request]
    return RowPass(
        positions,
        kv_slots(request, positions, stored, tables, page_size),
        tables,
        inputs.draft_start.int(),
        inputs.draft_count.int(),
        inputs.first.int(),
        size.max_rows + size.mask_rows,
        page_size,
        reads_new_keys=True,
    )


def kv_slots(
    request: Tensor, positions: Tensor, stored: Tensor, tables: Tensor, page_size: int
) -> Tensor:
    """Where the keys and values of each row go; -1 where they are not stored."""
    pages = tables[request, positions // page_size].long()
    return torch.where(stored, pages * page_size + positions % page_size, -1)

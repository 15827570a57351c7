"""The rows of a step, taken from the places where requests sit: the newest token and the first drafts of each.

    place 4: 9 tokens computed, newest 50, drafts 51 52 53, ends at position 11; 3 rows, pages of 4, table 7 2 5

    id         50       51       52
    position   9        10       11
    slot       21       22       -1 (from `ends` on nothing is stored)

The rows of a tree (peagle/tree.py) have the positions of their depths, and their masks; their slots are still those of
9, 10, 11, ...: each has one of its own.

One program a place. Shapes: index [B]; of every place: tables [P, pages], lengths, ends, newest [P], drafts [P, K]; of
trees depths [P, N] and masks [P, N + 1].
"""

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


class GatheredRows(NamedTuple):
    ids: Tensor  # [B, R] int64
    positions: Tensor  # [B * R] int64
    slots: Tensor  # [B * R] int64
    tables: Tensor  # [B, pages] int32
    starts: Tensor  # [B] int32: b * R
    counts: Tensor  # [B] int32: R
    first: Tensor  # [B] int32
    ends: Tensor  # [B] int32
    masks: Tensor | None  # [B * R] int64, of trees


def reference(
    index: Tensor,
    width: int,
    page: int,
    tables: Tensor,
    lengths: Tensor,
    ends: Tensor,
    newest: Tensor,
    drafts: Tensor,
    depths: Tensor | None = None,
    masks: Tensor | None = None,
) -> GatheredRows:
    """What the kernel computes, in plain PyTorch."""
    first, end, table = lengths[index], ends[index], tables[index]
    ids = torch.cat([newest[index][:, None], drafts[index, : width - 1]], 1)
    positions = places = first[:, None] + torch.arange(
        width, dtype=torch.int32, device=index.device
    )
    if depths is not None:
        positions = torch.cat([first[:, None], first[:, None] + depths[index, : width - 1]], 1)
    slots = torch.where(
        positions < end[:, None], kv_slots(table, places, page, table.shape[1] * page), -1
    )
    starts = torch.arange(0, len(index) * width, width, dtype=torch.int32, device=index.device)
    counts = torch.full_like(starts, width)
    seen = None if masks is None else masks[index, :width].flatten()
    return GatheredRows(
        ids, positions.flatten().long(), slots.flatten(), table, starts, counts, first, end, seen
    )


def kv_slots(tables: Tensor, positions: Tensor, page: int, ends: Tensor | int) -> Tensor:
    """tables [B, P], positions [B, R], ends [B, 1] -> slots [B, R]; -1 from position `ends` on."""
    inside = positions < ends
    at = torch.where(inside, positions, 0)
    pages = tables.gather(1, (at // page).long()).long()
    return torch.where(inside, pages * page + at % page, -1)


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        index,
        tables,
        lengths,
        ends,
        newest,
        drafts,
        depths,
        masks,
        ids,
        positions,
        slots,
        tables_out,
        starts,
        counts,
        first_out,
        ends_out,
        masks_out,
        pages,
        tables_row,
        drafts_row,
        masks_row,
        TREE: tl.constexpr,
        WIDTH: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        b = tl.program_id(0)
        place = tl.load(index + b)
        first, end = tl.load(lengths + place), tl.load(ends + place)
        row, at = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
        mine, out = row < WIDTH, b * WIDTH + row
        draft = tl.load(drafts + place * drafts_row + row - 1, mask=mine & (row > 0), other=0)
        tl.store(ids + out, tl.where(row == 0, tl.load(newest + place), draft), mask=mine)
        at_row = first + row
        position = at_row
        if TREE:
            position = first + tl.load(
                depths + place * drafts_row + row - 1, mask=mine & (row > 0), other=0
            )
            tl.store(
                masks_out + out,
                tl.load(masks + place * masks_row + row, mask=mine, other=0),
                mask=mine,
            )
        stored = mine & (position < end) & (at_row < pages * PAGE)
        page = tl.load(tables + place * tables_row + at_row // PAGE, mask=stored, other=0).to(
            tl.int64
        )
        tl.store(positions + out, position.to(tl.int64), mask=mine)
        tl.store(slots + out, tl.where(stored, page * PAGE + at_row % PAGE, -1), mask=mine)
        for begin in range(0, pages, BLOCK_P):
            there = begin + at < pages
            table = tl.load(tables + place * tables_row + begin + at, mask=there, other=0)
            tl.store(tables_out + b * pages + begin + at, table, mask=there)
        tl.store(starts + b, b * WIDTH)
        tl.store(counts + b, WIDTH)
        tl.store(first_out + b, first)
        tl.store(ends_out + b, end)


def gather_rows(
    index: Tensor,
    width: int,
    page: int,
    tables: Tensor,
    lengths: Tensor,
    ends: Tensor,
    newest: Tensor,
    drafts: Tensor,
    depths: Tensor | None = None,
    masks: Tensor | None = None,
) -> GatheredRows:
    """`width` rows of each place; `ends` is never behind what a table holds. `drafts` may be the nodes of trees."""
    if triton is None or not (index.is_cuda or triton.knobs.runtime.interpret):
        return reference(index, width, page, tables, lengths, ends, newest, drafts, depths, masks)
    batch, pages, device = len(index), tables.shape[1], index.device
    assert tables.stride(1) == drafts.stride(1) == 1 and width - 1 <= drafts.shape[1]
    made = GatheredRows(
        ids=torch.empty(batch, width, dtype=torch.int64, device=device),
        positions=torch.empty(batch * width, dtype=torch.int64, device=device),
        slots=torch.empty(batch * width, dtype=torch.int64, device=device),
        tables=torch.empty(batch, pages, dtype=torch.int32, device=device),
        starts=torch.empty(batch, dtype=torch.int32, device=device),
        counts=torch.empty(batch, dtype=torch.int32, device=device),
        first=torch.empty(batch, dtype=torch.int32, device=device),
        ends=torch.empty(batch, dtype=torch.int32, device=device),
        masks=None
        if masks is None
        else torch.empty(batch * width, dtype=torch.int64, device=device),
    )
    assert depths is None or (
        depths.stride() == drafts.stride() and masks is not None and masks.stride(1) == 1
    )
    _kernel[(batch,)](
        index,
        tables,
        lengths,
        ends,
        newest,
        drafts,
        depths,
        masks,
        *made,
        pages,
        tables.stride(0),
        drafts.stride(0),
        0 if masks is None else masks.stride(0),
        TREE=masks is not None,
        WIDTH=width,
        PAGE=page,
        BLOCK_R=triton.next_power_of_2(width),
        BLOCK_P=128,
        num_warps=1,
    )
    return made

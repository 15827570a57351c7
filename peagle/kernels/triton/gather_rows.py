"""The rows of a verification pass, gathered from decode slots: each newest token and its drafts.

    slot 4: length 9, newest 50, drafts 51 52 53, ends at position 11; 3 rows, page size 4,
    page table 7 2 5

    id         50       51       52
    position   9        10       11
    KV slot    21       22       -1   (rows from `ends` on store nothing)

The rows of a draft tree (peagle/draft_shape.py) have the positions of their depths, and masks;
their KV slots are still those of 9, 10, 11, ..., so that each row has its own.

A program computes one slot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.kernels.row_pass import RowPass
from peagle.kernels.slot_state import SlotState
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.build_tree import DraftTrees

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

TABLE_BLOCK = 128  # entries of a page table that are copied at once


class GatheredRows(NamedTuple):
    """B slots with R rows each."""

    ids: Tensor  # [B, R] int64
    positions: Tensor  # [B * R] int64
    kv_slots: Tensor  # [B * R] int64
    page_tables: Tensor  # [B, pages] int32
    row_starts: Tensor  # [B] int32: b * R
    row_counts: Tensor  # [B] int32: R
    first_positions: Tensor  # [B] int32
    ends: Tensor  # [B] int32
    tree_masks: Tensor | None  # [B * R] int64, for trees

    def row_pass(self, page_size: int, depth: int) -> RowPass:
        """`depth`: no row of a tree is deeper."""
        return RowPass(
            positions=self.positions,
            kv_slots=self.kv_slots,
            page_tables=self.page_tables,
            row_starts=self.row_starts,
            row_counts=self.row_counts,
            first_positions=self.first_positions,
            max_rows=self.ids.shape[1],
            page_size=page_size,
            tree_masks=self.tree_masks,
            tree_depth=depth,
        )


def reference(
    index: Tensor, shape: DraftShape, page_size: int, state: SlotState, trees: DraftTrees
) -> GatheredRows:
    """The same computation in plain PyTorch."""
    width = shape.nodes + 1
    first = state.lengths[index]
    ends = state.ends[index]
    page_tables = state.page_tables[index]
    drafts = trees.chain if shape.is_chain else trees.nodes
    ids = torch.cat([state.newest[index][:, None], drafts[index, : width - 1]], 1)
    stored_positions = first[:, None] + torch.arange(width, dtype=torch.int32, device=index.device)
    positions = stored_positions
    tree_masks = None
    if not shape.is_chain:
        depths = trees.depths[index, : width - 1]
        positions = torch.cat([first[:, None], first[:, None] + depths], 1)
        tree_masks = trees.masks[index, :width].flatten()
    capacity = page_tables.shape[1] * page_size
    slots = kv_slots(page_tables, stored_positions, page_size, capacity)
    slots = torch.where(positions < ends[:, None], slots, -1)
    row_starts = torch.arange(0, len(index) * width, width, dtype=torch.int32, device=index.device)
    return GatheredRows(
        ids=ids,
        positions=positions.flatten().long(),
        kv_slots=slots.flatten(),
        page_tables=page_tables,
        row_starts=row_starts,
        row_counts=torch.full_like(row_starts, width),
        first_positions=first,
        ends=ends,
        tree_masks=tree_masks,
    )


def kv_slots(page_tables: Tensor, positions: Tensor, page_size: int, ends: Tensor | int) -> Tensor:
    """page_tables [B, P], positions [B, R], ends [B, 1] -> KV slots [B, R]; -1 from `ends` on."""
    stored = positions < ends
    positions = torch.where(stored, positions, 0)
    pages = page_tables.gather(1, (positions // page_size).long()).long()
    return torch.where(stored, pages * page_size + positions % page_size, -1)


if triton is not None:

    @triton.jit
    def _gather_rows_kernel(  # type: ignore[no-untyped-def]
        index_ptr,
        page_tables_ptr,
        lengths_ptr,
        ends_ptr,
        newest_ptr,
        drafts_ptr,
        depths_ptr,
        masks_ptr,
        ids_out_ptr,
        positions_out_ptr,
        kv_slots_out_ptr,
        page_tables_out_ptr,
        row_starts_out_ptr,
        row_counts_out_ptr,
        first_positions_out_ptr,
        ends_out_ptr,
        masks_out_ptr,
        pages,
        stride_table_row,
        stride_drafts_row,
        stride_masks_row,
        TREE: tl.constexpr,
        WIDTH: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        b = tl.program_id(0)
        slot = tl.load(index_ptr + b)
        first = tl.load(lengths_ptr + slot)
        end = tl.load(ends_ptr + slot)
        row = tl.arange(0, BLOCK_R)
        mask = row < WIDTH
        draft_mask = mask & (row > 0)
        out = b * WIDTH + row
        drafts_row_ptr = drafts_ptr + slot * stride_drafts_row
        draft = tl.load(drafts_row_ptr + row - 1, mask=draft_mask, other=0)
        token = tl.where(row == 0, tl.load(newest_ptr + slot), draft)
        tl.store(ids_out_ptr + out, token, mask=mask)
        stored_position = first + row
        position = stored_position
        if TREE:
            depths_row_ptr = depths_ptr + slot * stride_drafts_row
            position = first + tl.load(depths_row_ptr + row - 1, mask=draft_mask, other=0)
            tree_mask = tl.load(masks_ptr + slot * stride_masks_row + row, mask=mask, other=0)
            tl.store(masks_out_ptr + out, tree_mask, mask=mask)
        stored = mask & (position < end) & (stored_position < pages * PAGE_SIZE)
        table_ptr = page_tables_ptr + slot * stride_table_row
        page = tl.load(table_ptr + stored_position // PAGE_SIZE, mask=stored, other=0).to(tl.int64)
        kv_slot = tl.where(stored, page * PAGE_SIZE + stored_position % PAGE_SIZE, -1)
        tl.store(positions_out_ptr + out, position.to(tl.int64), mask=mask)
        tl.store(kv_slots_out_ptr + out, kv_slot, mask=mask)
        for start in range(0, pages, BLOCK_P):
            col = start + tl.arange(0, BLOCK_P)
            table = tl.load(table_ptr + col, mask=col < pages, other=0)
            tl.store(page_tables_out_ptr + b * pages + col, table, mask=col < pages)
        tl.store(row_starts_out_ptr + b, b * WIDTH)
        tl.store(row_counts_out_ptr + b, WIDTH)
        tl.store(first_positions_out_ptr + b, first)
        tl.store(ends_out_ptr + b, end)


def gather_rows(
    index: Tensor, shape: DraftShape, page_size: int, state: SlotState, trees: DraftTrees
) -> GatheredRows:
    """Gather the rows of the slots `index` [B], whose drafts are verified in the given shape.

    state.ends must lie within the pages of a slot's table.
    """
    if not uses_triton(index):
        return reference(index, shape, page_size, state, trees)
    width = shape.nodes + 1
    drafts = trees.chain if shape.is_chain else trees.nodes
    assert state.page_tables.stride(1) == drafts.stride(1) == 1 and shape.nodes <= drafts.shape[1]
    assert shape.is_chain or trees.depths.stride() == drafts.stride()
    assert shape.is_chain or trees.masks.stride(1) == 1
    pages = state.page_tables.shape[1]
    rows = _empty_rows(len(index), width, pages, not shape.is_chain, index.device)
    _gather_rows_kernel[(len(index),)](
        index,
        state.page_tables,
        state.lengths,
        state.ends,
        state.newest,
        drafts,
        None if shape.is_chain else trees.depths,
        None if shape.is_chain else trees.masks,
        *rows,
        pages,
        state.page_tables.stride(0),
        drafts.stride(0),
        0 if shape.is_chain else trees.masks.stride(0),
        TREE=not shape.is_chain,
        WIDTH=width,
        PAGE_SIZE=page_size,
        BLOCK_R=triton.next_power_of_2(width),
        BLOCK_P=TABLE_BLOCK,
        num_warps=1,
    )
    return rows


def _empty_rows(
    batch: int, width: int, pages: int, tree: bool, device: torch.device
) -> GatheredRows:
    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return GatheredRows(
        ids=empty(batch, width, dtype=torch.int64),
        positions=empty(batch * width, dtype=torch.int64),
        kv_slots=empty(batch * width, dtype=torch.int64),
        page_tables=empty(batch, pages),
        row_starts=empty(batch),
        row_counts=empty(batch),
        first_positions=empty(batch),
        ends=empty(batch),
        tree_masks=empty(batch * width, dtype=torch.int64) if tree else None,
    )

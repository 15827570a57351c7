"""Where the last keys of each row of a draft tree are stored, in the order of their positions.

The lanes of a row are the positions from the group of 16 on that holds the root. A chain through
the row's ancestors would have them one after another; in a tree, the key of the ancestor at depth i
lies where its row is:

    first_positions[b] = 66, a row at depth 2 with the mask 0b10011 (rows 0, 1 and 4)

    lane             0   1   2   3   4   5 ..
    position         64  65  66  67  68  69
    KV position      64  65  66  67  70       66 + the row of the ancestor
    slot             of that position        -1

A parent has a smaller row number than its child, so the set bits of a mask are in the order of the
depths. Computed once for all layers of a pass: a layer finds a key with one look-up.

Shapes: rows.tree_masks [T] int64 -> slots [T, lanes] int32, -1 behind the row's own position.
"""

import torch
from torch import Tensor

from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

GROUP = 16  # keys that a tensor core adds at once


def most_lanes(depth: int) -> int:
    """Lanes of a row in whole groups, wherever in its group the root lies."""
    return (GROUP - 1 + depth + GROUP) // GROUP * GROUP


def reference(rows: RowPass) -> Tensor:
    """The same computation in plain PyTorch."""
    assert rows.tree_masks is not None
    lanes = num_lanes(rows)
    slots = torch.full((len(rows.tree_masks), lanes), -1, dtype=torch.int32)
    for table, start, count, first in zip(
        rows.page_tables.tolist(),
        rows.row_starts.tolist(),
        rows.row_counts.tolist(),
        rows.first_positions.tolist(),
        strict=True,
    ):
        committed = list(range(first // GROUP * GROUP, first))
        for row in range(start, start + count):
            mask = int(rows.tree_masks[row])
            path = [first + i for i in range(count) if mask >> i & 1]
            for lane, position in enumerate([*committed, *path][:lanes]):
                page, offset = divmod(position, rows.page_size)
                if page < len(table):
                    slots[row, lane] = table[page] * rows.page_size + offset
    return slots.to(rows.tree_masks.device)


if triton is not None:

    @triton.jit
    def _slot_of(  # type: ignore[no-untyped-def]
        position, table_ptr, pages, mask, PAGE_SIZE: tl.constexpr
    ):
        mask = mask & (position < pages * PAGE_SIZE)
        page = tl.load(table_ptr + position // PAGE_SIZE, mask=mask, other=0)
        return tl.where(mask, page * PAGE_SIZE + position % PAGE_SIZE, -1)

    @triton.jit
    def _tree_lanes_kernel(  # type: ignore[no-untyped-def]
        masks_ptr,
        page_tables_ptr,
        row_starts_ptr,
        row_counts_ptr,
        first_positions_ptr,
        slots_ptr,
        pages,
        stride_table_row,
        LANES: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_LANES: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        request = tl.program_id(0).to(tl.int64)
        row_count = tl.load(row_counts_ptr + request)
        if tl.program_id(1) >= row_count:
            return
        tree_row = tl.load(row_starts_ptr + request).to(tl.int64) + tl.program_id(1)
        first = tl.load(first_positions_ptr + request).to(tl.int32)
        table_ptr = page_tables_ptr + request * stride_table_row
        before = first % GROUP  # lanes in front of the root
        slot_ptr = slots_ptr + tree_row * LANES

        ancestor = tl.arange(0, BLOCK_ROWS)
        mask = tl.load(masks_ptr + tree_row)
        on_path = ((mask >> ancestor.to(tl.int64)) & 1).to(tl.int32)
        on_path = tl.where(ancestor < row_count, on_path, 0)
        ancestor_lane = before + tl.cumsum(on_path, 0) - 1
        is_lane = (on_path == 1) & (ancestor_lane < LANES)
        slot = _slot_of(first + ancestor, table_ptr, pages, is_lane, PAGE_SIZE)
        tl.store(slot_ptr + ancestor_lane, slot, mask=is_lane)

        lane = tl.arange(0, BLOCK_LANES)
        is_committed = lane < before
        slot = _slot_of(first - before + lane, table_ptr, pages, is_committed, PAGE_SIZE)
        is_other = (lane < LANES) & (is_committed | (lane >= before + tl.sum(on_path, 0)))
        tl.store(slot_ptr + lane, slot, mask=is_other)


def tree_lanes(rows: RowPass) -> Tensor:
    """The slots of a pass, computed once for all of its layers."""
    return rows.cached("tree_lanes", lambda: _tree_lanes(rows))


def num_lanes(rows: RowPass) -> int:
    return most_lanes(max_depth(rows))


def max_depth(rows: RowPass) -> int:
    """An upper bound of the depth of a tree's rows: a tree may be a chain of all its rows."""
    return rows.tree_depth or rows.max_rows - 1


def _tree_lanes(rows: RowPass) -> Tensor:
    masks, tables = rows.tree_masks, rows.page_tables
    assert masks is not None
    if not uses_triton(masks):
        return reference(rows)
    lanes = num_lanes(rows)
    slots = torch.empty(len(masks), lanes, dtype=torch.int32, device=masks.device)
    _tree_lanes_kernel[(len(tables), rows.max_rows)](
        masks,
        tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        slots,
        tables.shape[1],
        tables.stride(0),
        LANES=lanes,
        PAGE_SIZE=rows.page_size,
        GROUP=GROUP,
        BLOCK_LANES=triton.next_power_of_2(lanes),
        BLOCK_ROWS=triton.next_power_of_2(rows.max_rows),
        num_warps=1,
        **launch_options(masks),
    )
    return slots

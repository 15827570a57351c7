"""The keys that a block of tree rows reads behind the committed ones, in lanes for tensor cores.

A tensor core adds GROUP keys at once, in no order: which keys are added together decides the bits,
their places do not. A chain adds the keys of positions 16 g .. 16 g + 15 together. So the ancestors
of a row whose positions lie in one group must be in one group of lanes, in front of those of the
next group. Rows of a tree share ancestors: several rows share a group of lanes as long as their
ancestors fit, and a row has weights of 0 for the other lanes.

    first_positions[b] = 77, GROUP = 16, the parents - 0 1 2 0 of the rows 0 .. 4

    row               0    1    2    3    4
    position          77   78   79   80   78
    KV position       77   78   79   80   81

    lanes             0 .. 12   13     14  15    16 .. 28   29   30   31    32 .. 47
    KV position       64 .. 76  77     78  81    64 .. 76   77   78   79    80
    seen by rows      0 1 4     0 1 4  1   4     2 3        2 3  2 3  2 3   3

Rows are taken in the order of a depth-first search, so that those of a block have most ancestors in
common; 32 rows of a likely tree need 6 groups of lanes on average. Whole groups of committed keys
in front of the root come first, for all rows. Computed once for all layers of a pass.

Shapes: see TreeLanes. B requests, Q blocks of query rows, P blocks of keys that may hold nodes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

HOPPER = (9, 0)  # From this compute capability on, tensor cores add 16 keys at once, before that 8.


class TreeLanes(NamedTuple):
    order: Tensor  # [T] int32: the rows of each request, in the order in which blocks take them
    row_positions: Tensor  # [T] int32: the positions of the rows in this order
    ends: Tensor  # [B, Q] int32: the rows of a block see no position from here on
    counts: Tensor  # [B, Q, P] int32: lanes that are used
    # [B, Q, P, capacity], complete up to the end of a tile:
    slots: Tensor  # int32: where the key of a lane is stored; -1: nowhere
    positions: Tensor  # int32: its position in a chain
    rows: Tensor  # int32 or int64: bit i is set if row i of the block sees it


@dataclass(frozen=True, slots=True)
class LaneSizes:
    block_rows: int  # rows of a block of queries
    block_keys: int
    tile: int  # lanes that are read at once
    group: int  # keys that a tensor core adds at once
    depth: int  # an upper bound
    max_rows: int

    @property
    def query_blocks(self) -> int:
        return -(-self.max_rows // self.block_rows)

    @property
    def key_blocks(self) -> int:
        """Blocks of keys that may hold nodes, wherever in its block the root lies."""
        return (self.block_keys - 1 + self.depth) // self.block_keys + 1

    @property
    def capacity(self) -> int:
        """Lanes of a block: committed groups, and a group for each row and group of positions."""
        groups = min((self.group - 1 + self.depth) // self.group + 1, self.block_keys // self.group)
        lanes = self.block_keys - self.group + self.block_rows * groups * self.group
        return -(-lanes // self.tile) * self.tile

    @property
    def row_bits(self) -> torch.dtype:
        return torch.int32 if self.block_rows <= 32 else torch.int64


def group_size(device: torch.device) -> int:
    """The keys that a tensor core adds at once."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < HOPPER:
        return 8
    return 16


def max_depth(rows: RowPass) -> int:
    """An upper bound of the depth of a tree's rows: a tree may be a chain of all its rows."""
    return rows.tree_depth or rows.max_rows - 1


def lane_sizes(rows: RowPass, block_rows: int, block_keys: int, tile: int) -> LaneSizes:
    group = group_size(rows.page_tables.device)
    return LaneSizes(block_rows, block_keys, tile, group, max_depth(rows), rows.max_rows)


def new_lanes(rows: RowPass, sizes: LaneSizes) -> TreeLanes:
    """Nothing of them is set."""
    device = rows.page_tables.device
    blocks = (len(rows.page_tables), sizes.query_blocks, sizes.key_blocks)
    slots = torch.empty(*blocks, sizes.capacity, dtype=torch.int32, device=device)
    order = torch.empty(len(rows.positions), dtype=torch.int32, device=device)
    return TreeLanes(
        order,
        torch.empty_like(order),
        torch.empty(blocks[:2], dtype=torch.int32, device=device),
        torch.empty(blocks, dtype=torch.int32, device=device),
        slots,
        torch.empty_like(slots),
        torch.empty_like(slots, dtype=sizes.row_bits),
    )


class _BlockLanes:
    """The reference for one block of queries and one block of keys."""

    def __init__(self) -> None:
        self.lanes: list[tuple[int, int, int]] = []  # KV position, position, rows; KV -1: none

    def add_step(self, keys: dict[int, tuple[int, int]], group: int) -> None:
        """`keys`: position and rows by KV position."""
        self.lanes += [(kv_position, *keys[kv_position]) for kv_position in sorted(keys)]
        self.lanes += [(-1, 0, 0)] * (-len(self.lanes) % group)


def depth_first(masks: list[int]) -> list[int]:
    """The rows in the order of a depth-first search, children with higher numbers first."""
    bits = max(masks).bit_length()
    return sorted(range(len(masks)), key=lambda row: f"{masks[row]:0{bits}b}"[::-1])


def reference(rows: RowPass, sizes: LaneSizes) -> TreeLanes:
    """The same computation in plain Python."""
    assert rows.tree_masks is not None
    lanes = new_lanes(rows, sizes)
    for b, (start, count, first) in enumerate(
        zip(
            rows.row_starts.tolist(),
            rows.row_counts.tolist(),
            rows.first_positions.tolist(),
            strict=True,
        )
    ):
        masks = rows.tree_masks[start : start + count].tolist()
        order = depth_first(masks) if masks else []
        positions = [first + masks[row].bit_count() - 1 for row in order]
        lanes.order[start : start + count] = torch.tensor(order, dtype=torch.int32)
        lanes.row_positions[start : start + count] = torch.tensor(positions, dtype=torch.int32)
        for q in range(sizes.query_blocks):
            places = slice(q * sizes.block_rows, (q + 1) * sizes.block_rows)
            block = [masks[row] for row in order[places]]
            lanes.ends[b, q] = max(positions[places], default=-1) + 1
            for p in range(sizes.key_blocks if block else 0):
                low = (first // sizes.block_keys + p) * sizes.block_keys
                own = _block_lanes(masks, block, first, low, sizes).lanes
                lanes.counts[b, q, p] = len(own)
                own += [(-1, 0, 0)] * (-len(own) % sizes.tile)
                columns = zip(*((_slot(rows, b, lane[0]), *lane[1:]) for lane in own), strict=True)
                for table, column in zip(lanes[-3:], columns, strict=False):
                    table[b, q, p, : len(own)] = torch.tensor(column)
    return lanes


def _slot(rows: RowPass, b: int, kv_position: int) -> int:
    page, offset = divmod(kv_position, rows.page_size)
    if kv_position < 0 or page >= rows.page_tables.shape[1]:
        return -1
    return int(rows.page_tables[b, page]) * rows.page_size + offset


def _block_lanes(
    masks: list[int], block: list[int], first: int, low: int, sizes: LaneSizes
) -> _BlockLanes:
    """`block`: the masks of its rows; low: the first position of the block of keys."""
    lanes = _BlockLanes()
    group = sizes.group
    shared = range(low, max(first // group * group, low))
    lanes.add_step({position: (position, -1) for position in shared}, group)
    positions = [first + mask.bit_count() - 1 for mask in masks]
    for start in range(low + len(shared), low + sizes.block_keys, group):
        nodes = [i for i, position in enumerate(positions) if position // group == start // group]
        committed = range(start, max(first, start))
        step: dict[int, int] = {}  # rows by node
        for i, mask in enumerate(block):
            needed = {node for node in nodes if mask >> node & 1}
            if len(needed | step.keys()) > group - len(committed):
                _add_nodes(lanes, committed, step, first, positions, group)
                step = {}
            step |= {node: step.get(node, 0) | 1 << i for node in needed}
        if step:
            _add_nodes(lanes, committed, step, first, positions, group)
    return lanes


def _add_nodes(
    lanes: _BlockLanes,
    committed: range,
    step: dict[int, int],
    first: int,
    positions: list[int],
    group: int,
) -> None:
    keys = {position: (position, step[0]) for position in committed}  # All rows see the root.
    lanes.add_step(
        keys | {first + node: (positions[node], rows) for node, rows in step.items()}, group
    )


if triton is not None:

    @triton.jit
    def _slot_of(  # type: ignore[no-untyped-def]
        position, table_ptr, pages, mask, PAGE_SIZE: tl.constexpr
    ):
        mask = mask & (position < pages * PAGE_SIZE)
        page = tl.load(table_ptr + position // PAGE_SIZE, mask=mask, other=0)
        return tl.where(mask, page * PAGE_SIZE + position % PAGE_SIZE, -1)

    @triton.jit
    def _store_lanes(  # type: ignore[no-untyped-def]
        slots_ptr, positions_ptr, rows_ptr, lane, slot, position, rows, mask
    ):
        tl.store(slots_ptr + lane, slot, mask=mask)
        tl.store(positions_ptr + lane, position, mask=mask)
        tl.store(rows_ptr + lane, rows, mask=mask)

    @triton.jit
    def _store_group(  # type: ignore[no-untyped-def]
        slots_ptr,
        positions_ptr,
        rows_ptr,
        count,
        node_slot,
        node_position,
        node_rows,
        group_start,
        committed,
        table_ptr,
        pages,
        PAGE_SIZE: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        """One group of lanes behind the first `count`: committed keys, then nodes."""
        used = (node_rows != 0).to(tl.int32)
        node_lane = count + committed + tl.cumsum(used, 0) - 1
        _store_lanes(
            slots_ptr,
            positions_ptr,
            rows_ptr,
            node_lane,
            node_slot,
            node_position,
            node_rows,
            used == 1,
        )
        lane = tl.arange(0, GROUP)
        is_committed = lane < committed
        is_other = is_committed | (lane >= committed + tl.sum(used, 0))
        slot = _slot_of(group_start + lane, table_ptr, pages, is_committed, PAGE_SIZE)
        position = tl.where(is_committed, group_start + lane, 0)
        root = tl.arange(0, node_rows.shape[0]) == 0
        all_rows = tl.sum(tl.where(root, node_rows, 0), 0)  # All rows see the root.
        rows = tl.where(is_committed, all_rows, 0)
        _store_lanes(
            slots_ptr, positions_ptr, rows_ptr, count + lane, slot, position, rows, is_other
        )

    @triton.jit
    def _tree_lanes_kernel(  # type: ignore[no-untyped-def]
        masks_ptr,
        positions_ptr,
        page_tables_ptr,
        row_starts_ptr,
        row_counts_ptr,
        first_positions_ptr,
        order_ptr,
        row_positions_ptr,
        ends_ptr,
        counts_ptr,
        slots_ptr,
        lane_positions_ptr,
        lane_rows_ptr,
        pages,
        stride_table_row,
        PAGE_SIZE: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        TILE: tl.constexpr,
        GROUP: tl.constexpr,
        KEY_BLOCKS: tl.constexpr,
        CAPACITY: tl.constexpr,
        BLOCK_NODES: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        # Attention reads lanes before it waits, so no kernel may start before this one has ended.
        wait_for_inputs(DEPENDENT)
        request = tl.program_id(0).to(tl.int64)
        row_count = tl.load(row_counts_ptr + request).to(tl.int32)
        first_row = tl.program_id(1) * BLOCK_ROWS
        if first_row >= row_count:
            return
        end_row = tl.minimum(first_row + BLOCK_ROWS, row_count)
        row_start = tl.load(row_starts_ptr + request).to(tl.int64)
        first = tl.load(first_positions_ptr + request).to(tl.int32)
        table_ptr = page_tables_ptr + request * stride_table_row
        node = tl.arange(0, BLOCK_NODES)
        is_node = node < row_count
        masks = tl.load(masks_ptr + row_start + node, mask=is_node, other=0)
        node_position = tl.load(positions_ptr + row_start + node, mask=is_node, other=0)
        node_position = node_position.to(tl.int32)
        node_slot = _slot_of(first + node, table_ptr, pages, is_node, PAGE_SIZE)

        # Depth first: of two rows, the one without the lowest bit that differs comes first.
        difference = masks[:, None] ^ masks[None, :]
        lowest = difference & -difference
        is_behind = (masks[:, None] & lowest) != 0
        is_behind = tl.where(difference == 0, node[:, None] > node[None, :], is_behind)
        place = tl.sum((is_behind & is_node[None, :]).to(tl.int32), 1)
        in_block = is_node & (place >= first_row) & (place < end_row)
        tl.store(order_ptr + row_start + place, node, mask=in_block)
        tl.store(row_positions_ptr + row_start + place, node_position, mask=in_block)
        end = tl.max(tl.where(in_block, node_position, 0), 0) + 1
        query_block = request * tl.num_programs(1) + tl.program_id(1)
        tl.store(ends_ptr + query_block, end)

        block = query_block * KEY_BLOCKS
        for i in tl.static_range(KEY_BLOCKS):
            low = (first // BLOCK_KEYS + i) * BLOCK_KEYS
            base = (block + i) * CAPACITY
            block_slots_ptr = slots_ptr + base
            block_positions_ptr = lane_positions_ptr + base
            block_rows_ptr = lane_rows_ptr + base
            count = tl.maximum(first // GROUP * GROUP - low, 0)  # committed keys of all rows
            lane = tl.arange(0, BLOCK_KEYS)
            slot = _slot_of(low + lane, table_ptr, pages, lane < count, PAGE_SIZE)
            _store_lanes(
                block_slots_ptr,
                block_positions_ptr,
                block_rows_ptr,
                lane,
                slot,
                low + lane,
                -1,
                lane < count,
            )
            for group_start in range(low + count, tl.minimum(low + BLOCK_KEYS, end), GROUP):
                committed = tl.maximum(first - group_start, 0)
                in_group = is_node & (node_position // GROUP == group_start // GROUP)
                # The rows of the current group of lanes that see a node.
                node_rows = tl.zeros([BLOCK_NODES], lane_rows_ptr.dtype.element_ty)
                for row in range(first_row, end_row):
                    mask = tl.sum(tl.where(place == row, masks, 0), 0)
                    needed = in_group & (((mask >> node.to(tl.int64)) & 1) == 1)
                    joined = tl.sum((needed | (node_rows != 0)).to(tl.int32), 0)
                    if joined > GROUP - committed:
                        _store_group(
                            block_slots_ptr,
                            block_positions_ptr,
                            block_rows_ptr,
                            count,
                            node_slot,
                            node_position,
                            node_rows,
                            group_start,
                            committed,
                            table_ptr,
                            pages,
                            PAGE_SIZE,
                            GROUP,
                        )
                        count += GROUP
                        node_rows = tl.zeros_like(node_rows)
                    bit = tl.full([BLOCK_NODES], 1, node_rows.dtype) << (row - first_row)
                    node_rows = tl.where(needed, node_rows | bit, node_rows)
                if tl.sum((node_rows != 0).to(tl.int32), 0) > 0:
                    _store_group(
                        block_slots_ptr,
                        block_positions_ptr,
                        block_rows_ptr,
                        count,
                        node_slot,
                        node_position,
                        node_rows,
                        group_start,
                        committed,
                        table_ptr,
                        pages,
                        PAGE_SIZE,
                        GROUP,
                    )
                    count += GROUP
            tl.store(counts_ptr + block + i, count)
            lane = count + tl.arange(0, TILE)
            rest = lane < (count + TILE - 1) // TILE * TILE
            _store_lanes(block_slots_ptr, block_positions_ptr, block_rows_ptr, lane, -1, 0, 0, rest)


def tree_lanes(rows: RowPass, sizes: LaneSizes) -> TreeLanes:
    """The lanes of a pass, computed once for all of its layers."""
    return rows.cached(("tree_lanes", sizes), lambda: _tree_lanes(rows, sizes))


def _tree_lanes(rows: RowPass, sizes: LaneSizes) -> TreeLanes:
    masks, tables = rows.tree_masks, rows.page_tables
    assert masks is not None
    if not uses_triton(masks):
        return reference(rows, sizes)
    lanes = new_lanes(rows, sizes)
    _tree_lanes_kernel[(len(tables), sizes.query_blocks)](
        masks,
        rows.positions,
        tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        *lanes,
        tables.shape[1],
        tables.stride(0),
        PAGE_SIZE=rows.page_size,
        BLOCK_ROWS=sizes.block_rows,
        BLOCK_KEYS=sizes.block_keys,
        TILE=sizes.tile,
        GROUP=sizes.group,
        KEY_BLOCKS=sizes.key_blocks,
        CAPACITY=sizes.capacity,
        BLOCK_NODES=max(16, triton.next_power_of_2(rows.max_rows)),
        num_warps=1,
        **launch_options(masks),
    )
    return lanes

"""The online softmax of tree rows over a block of keys that holds positions of the tree.

The keys of a block of rows stand in lanes (tree_lanes.py): those of a row are added in the groups
in which a chain adds them, and it has weights of 0 for the lanes of others. If BLOCK_LANES are
enough, as is usual for few rows, this is one step like that of any block of keys. Otherwise the
lanes are read LOOP_LANES at a time, and twice: weights need the largest score of all of them.
"""

from typing import Any, NamedTuple

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.batch_invariant.attention_blocks import (
        WEIGHT_UNIT,
        _fixed_sum,
        _visible_scores,
    )
except ImportError:
    triton = None


class LaneTable(NamedTuple):
    """The lanes of a block of rows; in a kernel."""

    counts_ptr: Any
    slots_ptr: Any
    positions_ptr: Any
    rows_ptr: Any
    low_block: Any  # among the blocks of keys of all blocks of rows


class TailSizes(NamedTuple):
    """Constants of the kernel."""

    D: Any
    BLOCK_D: Any
    BLOCK_LANES: Any  # that are read at once, where they are all
    LOOP_LANES: Any  # that are read at once otherwise
    CAPACITY: Any
    STAGES: Any  # of the loops over tiles; 1: they load nothing ahead; None: as other loops


if triton is not None:
    _WEIGHT_UNIT = tl.constexpr(WEIGHT_UNIT)

    @triton.jit
    def load_lanes(  # type: ignore[no-untyped-def]
        table, block, start, COUNT: tl.constexpr, mask, sizes
    ):
        """Slots, positions and rows of COUNT lanes."""
        lane = (table.low_block + block).to(tl.int64) * sizes.CAPACITY + start
        lane += tl.arange(0, COUNT)
        slot = tl.load(table.slots_ptr + lane, mask=mask, other=-1)
        position = tl.load(table.positions_ptr + lane, mask=mask, other=0)
        rows = tl.load(table.rows_ptr + lane, mask=mask, other=0)
        return slot, position, rows

    @triton.jit
    def _load_slots(head_ptr, stride_slot, slot, sizes):  # type: ignore[no-untyped-def]
        """[lanes, d]: keys or values of one head."""
        dims = tl.arange(0, sizes.BLOCK_D)
        return tl.load(
            head_ptr + slot.to(tl.int64)[:, None] * stride_slot + dims[None, :],
            mask=(slot >= 0)[:, None] & (dims < sizes.D)[None, :],
            other=0.0,
        )

    @triton.jit
    def _lane_scores(q, k, lanes, rows, scale):  # type: ignore[no-untyped-def]
        slot, position, row_bits = lanes
        visible = ((row_bits[None, :] >> rows.place[:, None]) & 1) == 1
        visible = visible & (slot >= 0)[None, :]
        visible = visible & (position[None, :] > rows.position[:, None] - rows.window)
        return _visible_scores(q, k, scale, visible)

    @triton.jit
    def _attend_tile(  # type: ignore[no-untyped-def]
        q, keys, lanes, rows, scale, acc, max_score, total, sizes
    ):
        """The online softmax over all lanes at once."""
        k = _load_slots(keys.keys_ptr, keys.stride_k_slot, lanes[0], sizes)
        v = _load_slots(keys.values_ptr, keys.stride_v_slot, lanes[0], sizes)
        scores = _lane_scores(q, k, lanes, rows, scale)
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
        rescale = tl.exp2(max_score - new_max)
        acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + _fixed_sum(weights).to(tl.float32) / _WEIGHT_UNIT
        return acc, new_max, total

    @triton.jit
    def _attend_tiles(  # type: ignore[no-untyped-def]
        q, keys, table, block, count, rows, scale, acc, max_score, total, sizes
    ):
        """The largest scores of all tiles first, then their weights."""
        new_max = max_score
        for start in tl.range(0, count, sizes.LOOP_LANES, num_stages=sizes.STAGES):
            lanes = load_lanes(table, block, start, sizes.LOOP_LANES, True, sizes)
            k = _load_slots(keys.keys_ptr, keys.stride_k_slot, lanes[0], sizes)
            new_max = tl.maximum(new_max, tl.max(_lane_scores(q, k, lanes, rows, scale), 1))
        rescale = tl.exp2(max_score - new_max)
        acc = acc * rescale[:, None]
        units = tl.zeros_like(max_score).to(tl.int32)
        for start in tl.range(0, count, sizes.LOOP_LANES, num_stages=sizes.STAGES):
            lanes = load_lanes(table, block, start, sizes.LOOP_LANES, True, sizes)
            k = _load_slots(keys.keys_ptr, keys.stride_k_slot, lanes[0], sizes)
            scores = _lane_scores(q, k, lanes, rows, scale)
            v = _load_slots(keys.values_ptr, keys.stride_v_slot, lanes[0], sizes)
            weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
            acc = tl.dot(weights, v, acc, input_precision="ieee")
            units += _fixed_sum(weights)
        total = total * rescale + units.to(tl.float32) / _WEIGHT_UNIT
        return acc, new_max, total

    @triton.jit
    def load_count(table, block, mask):  # type: ignore[no-untyped-def]
        """The number of lanes of a block of keys."""
        return tl.load(table.counts_ptr + table.low_block + block, mask=mask, other=0)

    @triton.jit
    def attend_tail(  # type: ignore[no-untyped-def]
        q, keys, table, block, count, lanes, rows, scale, acc, max_score, total, sizes
    ):
        """`lanes`: the first BLOCK_LANES of `count`."""
        if count <= sizes.BLOCK_LANES:
            acc, max_score, total = _attend_tile(
                q, keys, lanes, rows, scale, acc, max_score, total, sizes
            )
        else:
            acc, max_score, total = _attend_tiles(
                q, keys, table, block, count, rows, scale, acc, max_score, total, sizes
            )
        return acc, max_score, total

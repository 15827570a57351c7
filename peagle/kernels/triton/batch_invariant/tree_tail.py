"""The online softmax of tree rows over a block of keys that holds positions of the tree.

Every row has its own keys there: what lies before the tree, and its ancestors at the places of
their depths, see paged_attention.py. A tensor core adds 16 keys at a time. The groups of 16 in
front of the first node are the same for all rows. Each row has `lanes` keys for the groups behind
them; the lanes of several rows stand side by side, and a row has weights of 0 for those of others:

    rows 1 and 2, lanes 16      lanes of row 1 | lanes of row 2
    weights of row 1            ..  . .. . ..  | 0 0 0 0 0 0 0
    weights of row 2            0 0 0 0 0 0 0  | . .. ... . ..
"""

from typing import Any, NamedTuple

from peagle.kernels.triton.attention.attention_plan import UNSEEN_SCORE

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.batch_invariant.attention_blocks import (
        WEIGHT_UNIT,
        _fixed_sum,
        _load_keys,
        _visible_scores,
    )
except ImportError:
    triton = None


class TailCache(NamedTuple):
    """Keys and values of one head, and the pages of one request; in a kernel."""

    keys_ptr: Any
    values_ptr: Any
    stride_k_slot: Any
    stride_v_slot: Any
    table_ptr: Any
    table_end: Any  # the first position behind the pages


class TailTree(NamedTuple):
    """The draft tree of one request: its rows, and where the keys of each are stored."""

    positions_ptr: Any
    masks_ptr: Any
    lanes_ptr: Any  # see tree_lanes.py
    row_start: Any
    row_count: Any
    first: Any  # the position of the root


class TailRows(NamedTuple):
    """The rows of the tree in a block of queries."""

    first_row: Any
    end_row: Any
    local_row: Any  # of each query
    row_mask: Any
    position: Any
    window: Any


class TailSizes(NamedTuple):
    """Constants of the kernel."""

    D: Any
    PAGE_SIZE: Any
    BLOCK_KEYS: Any
    BLOCK_D: Any
    DEPTH: Any
    LANES: Any
    BLOCK_NODES: Any
    BLOCK_LANES: Any


if triton is not None:
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)
    _WEIGHT_UNIT = tl.constexpr(WEIGHT_UNIT)

    @triton.jit
    def _load_tail(  # type: ignore[no-untyped-def]
        cache, kv_position, in_range, sizes
    ):
        """[keys, d] each: keys and values at these positions."""
        dims = tl.arange(0, sizes.BLOCK_D)
        keys = _load_keys(
            cache.keys_ptr,
            cache.stride_k_slot,
            cache.table_ptr,
            kv_position,
            in_range,
            dims,
            sizes.D,
            sizes.PAGE_SIZE,
        )
        values = _load_keys(
            cache.values_ptr,
            cache.stride_v_slot,
            cache.table_ptr,
            kv_position,
            in_range,
            dims,
            sizes.D,
            sizes.PAGE_SIZE,
        )
        return keys, values

    @triton.jit
    def _load_lanes(  # type: ignore[no-untyped-def]
        cache, tree, rows, chunk_start, lanes, block, sizes
    ):
        """Keys and values of a few rows, `lanes` of each, and which query sees them."""
        index = tl.arange(0, sizes.BLOCK_LANES)
        lane_row = index // lanes
        lane = index % lanes
        lane_position = tree.first // 16 * 16 + lane
        tail_row = chunk_start + lane_row
        is_lane = lane_row < sizes.BLOCK_LANES // lanes
        is_lane = is_lane & (lane_position // sizes.BLOCK_KEYS == block)
        is_lane = is_lane & (tail_row < rows.end_row)
        lane_ptr = tree.lanes_ptr + (tree.row_start + tail_row) * sizes.LANES + lane
        slot = tl.load(lane_ptr, mask=is_lane, other=-1)
        is_lane = is_lane & (slot >= 0)
        dims = tl.arange(0, sizes.BLOCK_D)
        mask = is_lane[:, None] & (dims < sizes.D)[None, :]
        slot = slot.to(tl.int64)[:, None]
        keys_ptr = cache.keys_ptr + slot * cache.stride_k_slot + dims[None, :]
        keys = tl.load(keys_ptr, mask=mask, other=0.0)
        values_ptr = cache.values_ptr + slot * cache.stride_v_slot + dims[None, :]
        values = tl.load(values_ptr, mask=mask, other=0.0)
        is_own = (tail_row[None, :] == rows.local_row[:, None]) & is_lane[None, :]
        is_own = is_own & (lane_position[None, :] > rows.position[:, None] - rows.window)
        return keys, values, is_own

    @triton.jit
    def _max_of_nodes(  # type: ignore[no-untyped-def]
        q, cache, tree, rows, block, scale, sizes
    ):
        """The largest score of each row with its ancestors in a block of positions."""
        node = tl.arange(0, sizes.BLOCK_NODES)
        is_node = (node < tree.row_count) & (tree.first + node < cache.table_end)
        node_ptr = tree.positions_ptr + tree.row_start + node
        node_position = tl.load(node_ptr, mask=is_node, other=0).to(tl.int32)
        keys = _load_keys(
            cache.keys_ptr,
            cache.stride_k_slot,
            cache.table_ptr,
            tree.first + node,
            is_node,
            tl.arange(0, sizes.BLOCK_D),
            sizes.D,
            sizes.PAGE_SIZE,
        )
        bits_ptr = tree.masks_ptr + tree.row_start + rows.local_row
        bits = tl.load(bits_ptr, mask=rows.row_mask, other=0)
        is_ancestor = ((bits[:, None] >> node.to(tl.int64)[None, :]) & 1) == 1
        in_block = is_node & (node_position // sizes.BLOCK_KEYS == block)
        is_ancestor = is_ancestor & in_block[None, :]
        is_ancestor = is_ancestor & (node_position[None, :] > rows.position[:, None] - rows.window)
        return tl.max(_visible_scores(q, keys, scale, is_ancestor), 1)

    @triton.jit
    def attend_tail(  # type: ignore[no-untyped-def]
        q, cache, tree, rows, block, scale, acc, max_score, total, sizes, ONE_CHUNK: tl.constexpr
    ):
        """The online softmax over a block of keys that holds positions of the tree.

        ONE_CHUNK: the lanes of all rows fit into BLOCK_LANES.
        """
        # Committed keys, for all rows at once.
        key_position = block * sizes.BLOCK_KEYS + tl.arange(0, sizes.BLOCK_KEYS)
        in_range = key_position < tl.minimum(tree.first, cache.table_end)
        k, v = _load_tail(cache, key_position, in_range, sizes)
        lanes = (tree.first % 16 + sizes.DEPTH + 16) // 16 * 16
        if ONE_CHUNK:  # All loads run at once.
            lane_keys, lane_values, is_own = _load_lanes(
                cache, tree, rows, rows.first_row, lanes, block, sizes
            )
        visible = key_position[None, :] > rows.position[:, None] - rows.window
        scores = _visible_scores(q, k, scale, visible & in_range[None, :])
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        if ONE_CHUNK:
            lane_scores = _visible_scores(q, lane_keys, scale, is_own)
            new_max = tl.maximum(new_max, tl.max(lane_scores, 1))
        else:
            node_max = _max_of_nodes(q, cache, tree, rows, block, scale, sizes)
            new_max = tl.maximum(new_max, node_max)
        rescale = tl.exp2(max_score - new_max)
        # A tensor core adds 16 keys at a time: those before the first with a node are shared.
        scores = tl.where((key_position < tree.first // 16 * 16)[None, :], scores, _UNSEEN_SCORE)
        weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
        acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")
        units = _fixed_sum(weights)
        if ONE_CHUNK:
            lane_weights = tl.exp2(lane_scores - new_max[:, None]).to(v.dtype)
            acc = tl.dot(lane_weights, lane_values, acc, input_precision="ieee")
            units += _fixed_sum(lane_weights)
        else:
            for chunk_start in range(rows.first_row, rows.end_row, sizes.BLOCK_LANES // lanes):
                chunk_keys, chunk_values, is_own = _load_lanes(
                    cache, tree, rows, chunk_start, lanes, block, sizes
                )
                chunk_scores = _visible_scores(q, chunk_keys, scale, is_own)
                chunk_weights = tl.exp2(chunk_scores - new_max[:, None]).to(v.dtype)
                acc = tl.dot(chunk_weights, chunk_values, acc, input_precision="ieee")
                units += _fixed_sum(chunk_weights)
        total = total * rescale + units.to(tl.float32) / _WEIGHT_UNIT
        return acc, new_max, total

"""The online softmax of tree rows over a block of keys that holds positions of the tree.

Every row has its own keys there: what lies before the tree, and its ancestors at the places of
their depths, see paged_attention.py. A tensor core adds 16 keys at a time. The groups of 16 in
front of the first node are the same for all rows. Each row has `lanes` keys for the groups behind
them; the lanes of several rows stand side by side, and a row has weights of 0 for those of others:

    rows 1 and 2, lanes 16      lanes of row 1 | lanes of row 2
    weights of row 1            ..  . .. . ..  | 0 0 0 0 0 0 0
    weights of row 2            0 0 0 0 0 0 0  | . .. ... . ..
"""

from peagle.kernels.triton.paged_attention import UNSEEN_SCORE

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

if triton is not None:
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)
    _WEIGHT_UNIT = tl.constexpr(WEIGHT_UNIT)

    @triton.jit
    def _tail_lanes(  # type: ignore[no-untyped-def]
        q,
        keys_ptr,
        values_ptr,
        stride_k_slot,
        stride_v_slot,
        table_ptr,
        paths_ptr,
        row_start,
        chunk_start,
        end_row,
        local_row,
        first,
        lanes,
        block,
        table_end,
        position,
        window,
        scale,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        MAX_ROWS: tl.constexpr,
        BLOCK_LANES: tl.constexpr,
    ):
        """Scores [queries, BLOCK_LANES] and values of the keys of a few rows, `lanes` of each."""
        dims = tl.arange(0, BLOCK_D)
        index = tl.arange(0, BLOCK_LANES)
        lane_row = index // lanes
        lane_position = first // 16 * 16 + index % lanes
        depth = lane_position - first
        tail_row = chunk_start + lane_row
        is_lane = (lane_row < BLOCK_LANES // lanes) & (lane_position // BLOCK_KEYS == block)
        is_lane = is_lane & (tail_row < end_row)
        in_tree = is_lane & (depth >= 0) & (depth < MAX_ROWS)
        path_ptr = paths_ptr + (row_start + tail_row) * MAX_ROWS + depth
        ancestor = tl.load(path_ptr, mask=in_tree, other=0)
        kv_position = tl.where(in_tree, first + ancestor, lane_position)
        is_lane = is_lane & (kv_position < table_end)
        keys = _load_keys(
            keys_ptr, stride_k_slot, table_ptr, kv_position, is_lane, dims, D, PAGE_SIZE
        )
        values = _load_keys(
            values_ptr, stride_v_slot, table_ptr, kv_position, is_lane, dims, D, PAGE_SIZE
        )
        is_own = (tail_row[None, :] == local_row[:, None]) & is_lane[None, :]
        is_own = is_own & (lane_position[None, :] <= position[:, None])
        is_own = is_own & (lane_position[None, :] > position[:, None] - window)
        return _visible_scores(q, keys, scale, is_own), values

    @triton.jit
    def _max_of_nodes(  # type: ignore[no-untyped-def]
        q,
        keys_ptr,
        stride_k_slot,
        table_ptr,
        positions_ptr,
        masks_ptr,
        row_start,
        row_count,
        local_row,
        row_mask,
        first,
        block,
        table_end,
        position,
        window,
        scale,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_NODES: tl.constexpr,
    ):
        """The largest score of each row with its ancestors in a block of positions."""
        node = tl.arange(0, BLOCK_NODES)
        is_node = (node < row_count) & (first + node < table_end)
        node_position = tl.load(positions_ptr + row_start + node, mask=is_node, other=0)
        node_position = node_position.to(tl.int32)
        keys = _load_keys(
            keys_ptr,
            stride_k_slot,
            table_ptr,
            first + node,
            is_node,
            tl.arange(0, BLOCK_D),
            D,
            PAGE_SIZE,
        )
        bits = tl.load(masks_ptr + row_start + local_row, mask=row_mask, other=0)
        is_ancestor = ((bits[:, None] >> node.to(tl.int64)[None, :]) & 1) == 1
        in_block = is_node & (node_position // BLOCK_KEYS == block)
        is_ancestor = is_ancestor & in_block[None, :]
        is_ancestor = is_ancestor & (node_position[None, :] > position[:, None] - window)
        return tl.max(_visible_scores(q, keys, scale, is_ancestor), 1)

    @triton.jit
    def attend_tail(  # type: ignore[no-untyped-def]
        q,
        keys_ptr,
        values_ptr,
        stride_k_slot,
        stride_v_slot,
        table_ptr,
        positions_ptr,
        masks_ptr,
        paths_ptr,
        row_start,
        row_count,
        first_row,
        end_row,
        local_row,
        row_mask,
        first,
        block,
        table_end,
        position,
        window,
        scale,
        acc,
        max_score,
        total,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DEPTH: tl.constexpr,
        MAX_ROWS: tl.constexpr,
        BLOCK_NODES: tl.constexpr,
        BLOCK_LANES: tl.constexpr,
        ONE_CHUNK: tl.constexpr,
    ):
        """The online softmax over a block of keys that holds positions of the tree.

        ONE_CHUNK: the lanes of all rows fit into BLOCK_LANES.
        """
        # Committed keys, for all rows at once.
        dims = tl.arange(0, BLOCK_D)
        key_position = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        in_range = key_position < tl.minimum(first, table_end)
        k = _load_keys(
            keys_ptr, stride_k_slot, table_ptr, key_position, in_range, dims, D, PAGE_SIZE
        )
        v = _load_keys(
            values_ptr, stride_v_slot, table_ptr, key_position, in_range, dims, D, PAGE_SIZE
        )
        visible = (key_position[None, :] > position[:, None] - window) & in_range[None, :]
        scores = _visible_scores(q, k, scale, visible)
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        lanes = (first % 16 + DEPTH + 16) // 16 * 16
        if ONE_CHUNK:
            lane_scores, lane_values = _tail_lanes(
                q,
                keys_ptr,
                values_ptr,
                stride_k_slot,
                stride_v_slot,
                table_ptr,
                paths_ptr,
                row_start,
                first_row,
                end_row,
                local_row,
                first,
                lanes,
                block,
                table_end,
                position,
                window,
                scale,
                D,
                PAGE_SIZE,
                BLOCK_KEYS,
                BLOCK_D,
                MAX_ROWS,
                BLOCK_LANES,
            )
            new_max = tl.maximum(new_max, tl.max(lane_scores, 1))
        else:
            node_max = _max_of_nodes(
                q,
                keys_ptr,
                stride_k_slot,
                table_ptr,
                positions_ptr,
                masks_ptr,
                row_start,
                row_count,
                local_row,
                row_mask,
                first,
                block,
                table_end,
                position,
                window,
                scale,
                D,
                PAGE_SIZE,
                BLOCK_KEYS,
                BLOCK_D,
                BLOCK_NODES,
            )
            new_max = tl.maximum(new_max, node_max)
        rescale = tl.exp2(max_score - new_max)
        # A tensor core adds 16 keys at a time: those before the first with a node are shared.
        scores = tl.where((key_position < first // 16 * 16)[None, :], scores, _UNSEEN_SCORE)
        weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
        acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")
        units = _fixed_sum(weights)
        if ONE_CHUNK:
            lane_weights = tl.exp2(lane_scores - new_max[:, None]).to(v.dtype)
            acc = tl.dot(lane_weights, lane_values, acc, input_precision="ieee")
            units += _fixed_sum(lane_weights)
        else:
            for chunk_start in range(first_row, end_row, BLOCK_LANES // lanes):
                chunk_scores, chunk_values = _tail_lanes(
                    q,
                    keys_ptr,
                    values_ptr,
                    stride_k_slot,
                    stride_v_slot,
                    table_ptr,
                    paths_ptr,
                    row_start,
                    chunk_start,
                    end_row,
                    local_row,
                    first,
                    lanes,
                    block,
                    table_end,
                    position,
                    window,
                    scale,
                    D,
                    PAGE_SIZE,
                    BLOCK_KEYS,
                    BLOCK_D,
                    MAX_ROWS,
                    BLOCK_LANES,
                )
                chunk_weights = tl.exp2(chunk_scores - new_max[:, None]).to(v.dtype)
                acc = tl.dot(chunk_weights, chunk_values, acc, input_precision="ieee")
                units += _fixed_sum(chunk_weights)
        total = total * rescale + units.to(tl.float32) / _WEIGHT_UNIT
        return acc, new_max, total

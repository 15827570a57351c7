"""The kernel of batch-invariant attention; see paged_attention.py."""

from peagle.kernels.triton.attention.attention_plan import LOG2_E, UNSEEN_SCORE

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.attention.rotary_rows import (
        HeadCache,
        NewRows,
        QkvProduct,
        QkvSizes,
        RopeTable,
        load_angles,
        load_new_block,
        load_positions,
        load_rotated,
        store_new_keys,
    )
    from peagle.kernels.triton.batch_invariant.attention_blocks import (
        HeadKeys,
        KeySizes,
        QueryRows,
        attend_block,
        attend_blocks,
        attend_split,
        load_slots,
        load_splits,
        merge_split,
    )
    from peagle.kernels.triton.batch_invariant.tree_tail import (
        LaneTable,
        TailSizes,
        attend_tail,
        load_count,
        load_lanes,
    )
    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:
    triton = None

if triton is not None:
    _LOG2_E = tl.constexpr(LOG2_E)
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)

    @triton.jit
    def invariant_attention_kernel(  # type: ignore[no-untyped-def]
        query_ptr,
        key_cache_ptr,
        value_cache_ptr,
        page_tables_ptr,
        row_starts_ptr,
        row_counts_ptr,
        first_positions_ptr,
        sinks_ptr,
        positions_ptr,
        order_ptr,
        row_positions_ptr,
        ends_ptr,
        lane_counts_ptr,
        lane_slots_ptr,
        lane_positions_ptr,
        lane_rows_ptr,
        out_ptr,
        part_ptr,
        max_ptr,
        sum_ptr,
        counters_ptr,
        scale,
        window,
        pages,
        stride_q_row,
        stride_q_head,
        stride_k_slot,
        stride_k_head,
        stride_v_slot,
        stride_v_head,
        stride_table_row,
        stride_o_row,
        stride_o_head,
        kv_slots_ptr,
        rope_table_ptr,
        max_positions,
        stride_q_split,
        stride_rope_row,
        ROTATE: tl.constexpr,
        ROT: tl.constexpr,
        SUMS: tl.constexpr,
        BLOCK_NEW: tl.constexpr,
        MORE_ROWS: tl.constexpr,
        HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        ONE_PAGE: tl.constexpr,
        EARLY_VALUES: tl.constexpr,
        SPLITS: tl.constexpr,
        PARALLEL: tl.constexpr,
        SINKS: tl.constexpr,
        TREE: tl.constexpr,
        TAIL_BLOCKS: tl.constexpr,
        LANE_CAPACITY: tl.constexpr,
        BLOCK_LANES: tl.constexpr,
        LOOP_LANES: tl.constexpr,
        TAIL_STAGES: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_QUERIES: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        request = tl.program_id(0)
        kv_head = tl.program_id(1).to(tl.int64)
        query_block = tl.program_id(2)
        split = 0
        if PARALLEL:
            split = query_block % SPLITS
            query_block = query_block // SPLITS
        row_count = tl.load(row_counts_ptr + request).to(tl.int32)
        row_start = tl.load(row_starts_ptr + request).to(tl.int64)
        first = tl.load(first_positions_ptr + request).to(tl.int32)
        first_row = query_block * BLOCK_ROWS
        end_row = tl.minimum(first_row + BLOCK_ROWS, row_count)
        query_index = tl.arange(0, BLOCK_QUERIES)
        local_row = first_row + query_index // GROUP
        head = kv_head * GROUP + query_index % GROUP
        row_mask = local_row < end_row
        position = first + local_row
        if TREE:
            place = row_start + local_row
            local_row = tl.load(order_ptr + place, mask=row_mask, other=0)
            position = tl.load(row_positions_ptr + place, mask=row_mask, other=0)
        dims = tl.arange(0, BLOCK_D)
        row = row_start + local_row
        query_mask = row_mask[:, None] & (dims < D)[None, :]
        keys_ptr = key_cache_ptr + kv_head * stride_k_head
        values_ptr = value_cache_ptr + kv_head * stride_v_head
        # Blocks low_block .. low_block + blocks - 1 hold the keys that some row sees; low_block
        # belongs to split 0. Those from shared_blocks on are the tail of a tree.
        low = tl.maximum(first + first_row - window + 1, 0)
        high = first + end_row
        if TREE:
            query_blocks = tl.num_programs(2) // (SPLITS if PARALLEL else 1)
            tree_block = request * query_blocks + query_block
            low = tl.maximum(first - window + 1, 0)
            high = tl.load(ends_ptr + tree_block)  # Not masked: that would wait for row_count.
            high = tl.where(first_row < row_count, high, 0)
        high = tl.minimum(high, pages * PAGE_SIZE)
        low_block = low // BLOCK_KEYS // SPLITS * SPLITS
        blocks = tl.maximum((high + BLOCK_KEYS - 1) // BLOCK_KEYS - low_block, 0)
        shared_blocks = blocks
        # At least one program writes rows that see no key: those behind the end of the pages.
        used_splits = tl.maximum(tl.minimum(blocks, SPLITS), 1)
        # The others leave their place to the next kernel at once. Split 0 always waits: what comes
        # behind this kernel must not begin before the one in front has ended.
        if PARALLEL and split >= used_splits:
            return
        rows = QueryRows(query_index // GROUP, position, window)
        if TREE:
            shared_blocks = tl.minimum(first // BLOCK_KEYS - low_block, blocks)
            tail_split = shared_blocks % SPLITS  # of the first block of the tail
            first_tail = tree_block * TAIL_BLOCKS - first // BLOCK_KEYS
            lane_table = LaneTable(
                lane_counts_ptr,
                lane_slots_ptr,
                lane_positions_ptr,
                lane_rows_ptr,
                first_tail + low_block,
            )
            tail_sizes: tl.constexpr = TailSizes(
                D, BLOCK_D, BLOCK_LANES, LOOP_LANES, LANE_CAPACITY, TAIL_STAGES
            )
        if TREE and PARALLEL:
            tail = shared_blocks + (split - tail_split + SPLITS) % SPLITS
            lane_count = load_count(lane_table, tail, tail < blocks)
            lanes = load_lanes(lane_table, tail, 0, BLOCK_LANES, tail < blocks, tail_sizes)
        table_ptr = page_tables_ptr + request.to(tl.int64) * stride_table_row
        keys = HeadKeys(keys_ptr, values_ptr, stride_k_slot, stride_v_slot, table_ptr, high)
        key_sizes: tl.constexpr = KeySizes(D, PAGE_SIZE, BLOCK_KEYS, BLOCK_D, ONE_PAGE)
        if PARALLEL:  # Most splits have one block: where it is stored is looked up ahead.
            first_key = (low_block + split) * BLOCK_KEYS
            first_slot = load_slots(keys, first_key, key_sizes)
        if ROTATE:
            READ_SPLITS: tl.constexpr = SPLITS if PARALLEL else 1
            sizes: tl.constexpr = QkvSizes(
                HEADS, GROUP, D, ROT, SUMS, READ_SPLITS, TREE, BLOCK_KEYS, BLOCK_NEW, BLOCK_D
            )
            rope = RopeTable(positions_ptr, rope_table_ptr, stride_rope_row, max_positions)
            product = QkvProduct(query_ptr, stride_q_split, stride_q_row)
            dtype = key_cache_ptr.dtype.element_ty
            q_position = position if TREE else load_positions(rope, row, row_mask)
            q_angles = load_angles(rope, q_position, row_mask, sizes, dtype)
            cache = HeadCache(
                keys_ptr + dims[None, :],
                values_ptr + dims[None, :],
                stride_k_slot,
                stride_v_slot,
                kv_slots_ptr,
            )
            # The ancestors of a tree's row may be anywhere among the rows.
            new_rows = NewRows(row_start, first, row_count if TREE else end_row, split, kv_head)
            new_block = load_new_block(rope, new_rows, cache, 0, sizes, dtype)
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        if first_row >= row_count:
            return
        if ROTATE:
            q = load_rotated(product, row, head, row_mask, q_angles, sizes)
            store_new_keys(product, new_rows, rope, new_block, cache, sizes, MORE_ROWS)
            tl.debug_barrier()  # Every thread has stored: the new keys are read as the others.
        else:
            q = tl.load(
                query_ptr + row[:, None] * stride_q_row + head[:, None] * stride_q_head + dims,
                mask=query_mask,
                other=0.0,
            )

        max_score = tl.full([BLOCK_QUERIES], _UNSEEN_SCORE, tl.float32)
        total = tl.zeros([BLOCK_QUERIES], tl.float32)
        if SINKS:  # Split 0 counts the sink.
            sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
            max_score = tl.where(split == 0, sink, max_score)
            total = tl.where(split == 0, 1.0, total)
        acc = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
        merged_max = tl.full([BLOCK_QUERIES], _UNSEEN_SCORE, tl.float32)
        merged_total = tl.zeros([BLOCK_QUERIES], tl.float32)
        merged = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
        if PARALLEL:
            if split < shared_blocks:
                acc, max_score, total = attend_block(
                    q,
                    keys,
                    first_key,
                    first_slot,
                    rows,
                    scale,
                    acc,
                    max_score,
                    total,
                    key_sizes,
                    EARLY_VALUES,
                )
            acc, max_score, total = attend_split(
                q,
                keys,
                low_block + split + SPLITS,
                low_block + shared_blocks,
                rows,
                scale,
                acc,
                max_score,
                total,
                SPLITS,
                key_sizes,
            )
            if TREE:  # noqa: SIM102 - a constant
                if tail < blocks:
                    acc, max_score, total = attend_tail(
                        q,
                        keys,
                        lane_table,
                        tail,
                        lane_count,
                        lanes,
                        rows,
                        scale,
                        acc,
                        max_score,
                        total,
                        tail_sizes,
                    )
        elif TREE:
            for own_split in range(used_splits):
                if own_split > 0:
                    max_score = tl.full([BLOCK_QUERIES], _UNSEEN_SCORE, tl.float32)
                    total = tl.zeros([BLOCK_QUERIES], tl.float32)
                    acc = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
                acc, max_score, total = attend_split(
                    q,
                    keys,
                    low_block + own_split,
                    low_block + shared_blocks,
                    rows,
                    scale,
                    acc,
                    max_score,
                    total,
                    SPLITS,
                    key_sizes,
                )
                tail = shared_blocks + (own_split - tail_split + SPLITS) % SPLITS
                if tail < blocks:
                    lane_count = load_count(lane_table, tail, True)
                    lanes = load_lanes(lane_table, tail, 0, BLOCK_LANES, True, tail_sizes)
                    acc, max_score, total = attend_tail(
                        q,
                        keys,
                        lane_table,
                        tail,
                        lane_count,
                        lanes,
                        rows,
                        scale,
                        acc,
                        max_score,
                        total,
                        tail_sizes,
                    )
                merged, merged_max, merged_total = merge_split(
                    merged, merged_max, merged_total, acc, max_score, total
                )
        else:
            merged, merged_max, merged_total = attend_blocks(
                q,
                keys,
                low_block,
                blocks,
                rows,
                scale,
                acc,
                max_score,
                total,
                merged,
                merged_max,
                merged_total,
                SPLITS,
                key_sizes,
            )
        if PARALLEL:
            part = (row * HEADS + head) * SPLITS
            query_blocks = tl.num_programs(2) // SPLITS
            counter = (request * tl.num_programs(1) + tl.program_id(1)) * query_blocks + query_block
            split_part = part + split
            tl.store(max_ptr + split_part, max_score, mask=row_mask)
            tl.store(sum_ptr + split_part, total, mask=row_mask)
            tl.store(part_ptr + split_part[:, None] * D + dims[None, :], acc, mask=query_mask)
            tl.debug_barrier()  # Every thread has stored.
            if tl.atomic_add(counters_ptr + counter, 1) < used_splits - 1:
                return
            tl.store(counters_ptr + counter, 0)  # for the next launch
            merged, merged_max, merged_total = load_splits(
                part_ptr,
                max_ptr,
                sum_ptr,
                part,
                used_splits,
                row_mask,
                query_mask,
                merged,
                merged_max,
                merged_total,
                D,
                SPLITS,
                BLOCK_D,
            )
        result = merged / tl.maximum(merged_total, 1e-9)[:, None]
        tl.store(
            out_ptr + row[:, None] * stride_o_row + head[:, None] * stride_o_head + dims[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=query_mask,
        )

"""Attention over paged keys and values, in an order that the position of a row alone decides.

Rows, pages and visibility are those of paged_attention.py in the folder above. The keys of a
request are cut into blocks of BLOCK_KEYS by their position, and block i belongs to split
i % KEY_SPLITS. A row runs an online softmax over the blocks of each split in turn, and the splits
are merged in their order:

    KEY_SPLITS 2, a row that sees the blocks 0 .. 4:   (0, 2, 4) merged with (1, 3)

Blocks without a visible key change nothing: their weights are exactly 0, and what came before is
scaled by exactly 1. So neither the other rows of a block of queries nor their number matters. The
weights of a block are added as integers, because the order of a sum over the keys depends on the
number of queries.

With few blocks of queries, every split has its own program, and the last one to finish merges
their results. With many, every program runs over all splits.

A row of a draft tree gets the bits of a chain through its ancestors. Blocks that lie entirely
before the tree are shared by all rows. For the blocks behind them, called the tail, the keys of
each row are gathered in the order of their positions, the ancestors where a chain would have them:

    first_positions[b] = 66, BLOCK_KEYS = 64, a row at depth 2 with the path 0 1 4

    position         64  65  66  67  68
    KV position      64  65  66  67  70     66 + the row of the ancestor

The other rows of the block have weights of 0 for these keys (tree_tail.py).

Shapes: query and result [T, heads, d], key_cache and value_cache [num_slots, kv_heads, d].
"""

from torch import Tensor

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.attention_plan import LOG2_E, new_split_counters, split_buffers
from peagle.kernels.triton.batch_invariant.attention_plan import (
    AttentionPlan,
    block_sizes,
    plan_attention,
)
from peagle.kernels.triton.batch_invariant.tree_lanes import tree_lanes
from peagle.kernels.triton.launch.dependent_launch import launch_options
from peagle.kernels.triton.paged_attention import UNSEEN_SCORE

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.batch_invariant.attention_blocks import (
        attend_block,
        load_splits,
        merge_split,
    )
    from peagle.kernels.triton.batch_invariant.tree_tail import (
        TailCache,
        TailRows,
        TailSizes,
        TailTree,
        attend_tail,
    )
    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:
    triton = None

KEY_SPLITS = 8

if triton is not None:
    _LOG2_E = tl.constexpr(LOG2_E)
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)

    @triton.jit
    def _invariant_attention_kernel(  # type: ignore[no-untyped-def]
        query_ptr,
        key_cache_ptr,
        value_cache_ptr,
        page_tables_ptr,
        row_starts_ptr,
        row_counts_ptr,
        first_positions_ptr,
        sinks_ptr,
        positions_ptr,
        masks_ptr,
        lanes_ptr,
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
        HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        SPLITS: tl.constexpr,
        PARALLEL: tl.constexpr,
        SINKS: tl.constexpr,
        TREE: tl.constexpr,
        DEPTH: tl.constexpr,
        LANES: tl.constexpr,
        BLOCK_NODES: tl.constexpr,
        BLOCK_LANES: tl.constexpr,
        ONE_CHUNK: tl.constexpr,
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
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        first_row = query_block * BLOCK_ROWS
        if first_row >= row_count:
            return
        end_row = tl.minimum(first_row + BLOCK_ROWS, row_count)
        query_index = tl.arange(0, BLOCK_QUERIES)
        local_row = first_row + query_index // GROUP
        head = kv_head * GROUP + query_index % GROUP
        row_mask = local_row < end_row
        dims = tl.arange(0, BLOCK_D)
        row = row_start + local_row
        query_mask = row_mask[:, None] & (dims < D)[None, :]
        q = tl.load(
            query_ptr + row[:, None] * stride_q_row + head[:, None] * stride_q_head + dims[None, :],
            mask=query_mask,
            other=0.0,
        )

        # Blocks low_block .. low_block + blocks - 1 hold the keys that some row sees; low_block
        # belongs to split 0. Those from shared_blocks on are the tail of a tree.
        position = first + local_row
        low = tl.maximum(first + first_row - window + 1, 0)
        high = first + end_row
        if TREE:
            position = tl.load(positions_ptr + row, mask=row_mask, other=0).to(tl.int32)
            low = tl.maximum(first - window + 1, 0)
            high = tl.max(tl.where(row_mask, position, 0), 0) + 1
        table_end = pages * PAGE_SIZE
        high = tl.minimum(high, table_end)
        low_block = low // BLOCK_KEYS // SPLITS * SPLITS
        blocks = (high + BLOCK_KEYS - 1) // BLOCK_KEYS - low_block
        shared_blocks = blocks
        if TREE:
            shared_blocks = tl.minimum(first // BLOCK_KEYS - low_block, blocks)
        # At least one program writes rows that see no key: those behind the end of the pages.
        used_splits = tl.maximum(tl.minimum(blocks, SPLITS), 1)
        own_splits = used_splits  # of this program
        if PARALLEL:
            own_splits = 1
            if split >= used_splits:
                return

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
        table_ptr = page_tables_ptr + request.to(tl.int64) * stride_table_row
        keys_ptr = key_cache_ptr + kv_head * stride_k_head
        values_ptr = value_cache_ptr + kv_head * stride_v_head
        if PARALLEL or TREE:
            for i in range(own_splits):
                own_split = split + i
                if i > 0:
                    max_score = tl.full([BLOCK_QUERIES], _UNSEEN_SCORE, tl.float32)
                    total = tl.zeros([BLOCK_QUERIES], tl.float32)
                    acc = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
                low_key = (low_block + own_split) * BLOCK_KEYS
                end_key = (low_block + shared_blocks) * BLOCK_KEYS
                for start in range(low_key, end_key, SPLITS * BLOCK_KEYS):
                    acc, max_score, total = attend_block(
                        q,
                        keys_ptr,
                        values_ptr,
                        stride_k_slot,
                        stride_v_slot,
                        table_ptr,
                        start,
                        high,
                        position,
                        window,
                        scale,
                        acc,
                        max_score,
                        total,
                        D,
                        PAGE_SIZE,
                        BLOCK_KEYS,
                        BLOCK_D,
                    )
                # The first block of this split behind the shared ones.
                block = shared_blocks + (own_split - shared_blocks % SPLITS + SPLITS) % SPLITS
                if TREE and block < blocks:
                    acc, max_score, total = attend_tail(
                        q,
                        TailCache(
                            keys_ptr, values_ptr, stride_k_slot, stride_v_slot, table_ptr, table_end
                        ),
                        TailTree(positions_ptr, masks_ptr, lanes_ptr, row_start, row_count, first),
                        TailRows(first_row, end_row, local_row, row_mask, position, window),
                        low_block + block,
                        scale,
                        acc,
                        max_score,
                        total,
                        TailSizes(
                            D,
                            PAGE_SIZE,
                            BLOCK_KEYS,
                            BLOCK_D,
                            DEPTH,
                            LANES,
                            BLOCK_NODES,
                            BLOCK_LANES,
                        ),
                        ONE_CHUNK,
                    )
                if not PARALLEL:
                    merged, merged_max, merged_total = merge_split(
                        merged, merged_max, merged_total, acc, max_score, total
                    )
        else:
            # One loop over all blocks, split after split, so that loads run ahead.
            block = 0
            for _ in range(blocks):
                if block < SPLITS and block > 0:  # the first block of its split
                    merged, merged_max, merged_total = merge_split(
                        merged, merged_max, merged_total, acc, max_score, total
                    )
                    max_score = tl.full([BLOCK_QUERIES], _UNSEEN_SCORE, tl.float32)
                    total = tl.zeros([BLOCK_QUERIES], tl.float32)
                    acc = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
                acc, max_score, total = attend_block(
                    q,
                    keys_ptr,
                    values_ptr,
                    stride_k_slot,
                    stride_v_slot,
                    table_ptr,
                    (low_block + block) * BLOCK_KEYS,
                    high,
                    position,
                    window,
                    scale,
                    acc,
                    max_score,
                    total,
                    D,
                    PAGE_SIZE,
                    BLOCK_KEYS,
                    BLOCK_D,
                )
                following = block + SPLITS
                block = tl.where(following < blocks, following, block % SPLITS + 1)
            merged, merged_max, merged_total = merge_split(
                merged, merged_max, merged_total, acc, max_score, total
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


def supports_invariant_attention(query: Tensor, params: AttentionParams, rows: RowPass) -> bool:
    return uses_triton(query) and params.softcap is None and not rows.bidirectional_rows


def invariant_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor,
    split_counters: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Run the kernel; the contract is that of `paged_attention`, without soft caps."""
    assert supports_invariant_attention(query, params, rows)
    if plan is None:
        kv_heads = key_cache.shape[1]
        plan = plan_attention(
            len(rows.page_tables) * kv_heads,
            rows.max_rows,
            query.shape[1] // kv_heads,
            query,
            is_tree=rows.tree_masks is not None,
        )
    counters = new_split_counters(query.device) if split_counters is None else split_counters
    _launch(query, key_cache, value_cache, rows, params, out, counters, plan)
    return out


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor,
    counters: Tensor,
    plan: AttentionPlan,
) -> None:
    batch = len(rows.page_tables)
    kv_heads = key_cache.shape[1]
    blocks = triton.cdiv(rows.max_rows, plan.block_rows)
    programs = KEY_SPLITS if plan.parallel else 1  # for each block of queries
    assert programs == 1 or batch * kv_heads * blocks <= len(counters)
    _invariant_attention_kernel[(batch, kv_heads, blocks * programs)](
        query,
        key_cache,
        value_cache,
        rows.page_tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        query if params.sinks is None else params.sinks,
        rows.positions,
        rows.tree_masks,
        tree_lanes(rows) if rows.tree_masks is not None else None,
        out,
        *split_buffers(out, programs),
        counters,
        params.scale * LOG2_E,
        params.window_size,
        rows.page_tables.shape[1],
        *query.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        rows.page_tables.stride(0),
        *out.stride()[:2],
        PAGE_SIZE=rows.page_size,
        SINKS=params.sinks is not None,
        SPLITS=KEY_SPLITS,
        **block_sizes(query, kv_heads, rows, plan),
        enable_fp_fusion=False,  # The merges of both kinds of programs must round alike.
        **launch_options(query),
    )

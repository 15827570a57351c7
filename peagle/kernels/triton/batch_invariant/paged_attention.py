"""Attention over paged keys and values, in an order that the position of a row alone decides.

Rows, pages and visibility are those of paged_attention.py in the folder above. The keys of a
request are cut into blocks of BLOCK_KEYS by their position, and block i belongs to split
i % KEY_SPLITS. A row runs an online softmax over the blocks of each split in turn, and the splits
are merged in their order:

    KEY_SPLITS 2, a row that sees the blocks 0 .. 4:   (0, 2, 4) merged with (1, 3)

Blocks without a visible key change nothing: their weights are exactly 0, and what came before is
scaled by exactly 1. So neither the other rows of a block of queries nor their number matters. The
total weight of a row is a product with a column of ones, because a tensor core adds in an order
that does not depend on the shape of the block.

With few blocks of queries, every split has its own program, and the last one to finish merges
their results. With many, a program runs over all splits.

A row of a draft tree gets the bits of a chain through its ancestors. Blocks that lie entirely
before the tree are shared by all rows. For the blocks behind them, called the tail, the keys of
each row are gathered in the order of their positions, the ancestors where a chain would have them:

    first_positions[b] = 66, BLOCK_KEYS = 64, a row at depth 2 with the path 0 1 4

    position         64  65  66  67  68
    KV position      64  65  66  67  70     66 + the row of the ancestor

While the tail of one row is processed, the other rows of the block see no key.

Shapes: query and result [T, heads, d], key_cache and value_cache [num_slots, kv_heads, d].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.batch_invariant.tree_paths import tree_paths
from peagle.kernels.triton.launch.dependent_launch import launch_options
from peagle.kernels.triton.paged_attention import (
    LOG2_E,
    SPLIT_COUNTERS,
    UNSEEN_SCORE,
    new_split_counters,
)

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:
    triton = None

KEY_SPLITS = 8
MIN_BLOCK_QUERIES = 16
# With 64 queries, Triton uses another tensor-core instruction (wgmma) than with fewer.
MAX_BLOCK_QUERIES = 64
MAX_BLOCK_QUERIES_FLOAT32 = 32
BUSY_PROGRAMS = 264  # programs that keep a GPU busy
TOTAL_COLUMNS = 16  # columns of ones: the fewest that tensor cores take


class AttentionPlan(NamedTuple):
    block_rows: int  # rows of a request in a block
    block_queries: int  # rows x heads of a group, padded
    parallel: bool  # a program for each split


if triton is not None:
    _LOG2_E = tl.constexpr(LOG2_E)
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)

    @triton.jit
    def _merge_split(acc, max_score, total, split_acc, split_max, split_total):  # type: ignore[no-untyped-def]
        """Add a split to those before it."""
        new_max = tl.maximum(max_score, split_max)
        rescale = tl.exp2(max_score - new_max)
        weight = tl.exp2(split_max - new_max)
        total = total * rescale + split_total * weight
        acc = acc * rescale[:, None] + split_acc * weight[:, None]
        return acc, new_max, total

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
        paths_ptr,
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
        stride_path_row,
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
        BLOCK_ROWS: tl.constexpr,
        BLOCK_QUERIES: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        TOTAL_COLUMNS: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        request = tl.program_id(0)
        kv_head = tl.program_id(1).to(tl.int64)
        block = tl.program_id(2)
        split = 0
        if PARALLEL:
            split = block % SPLITS
            block = block // SPLITS
        row_count = tl.load(row_counts_ptr + request).to(tl.int32)
        first_row = block * BLOCK_ROWS
        if first_row >= row_count:
            return
        end_row = tl.minimum(first_row + BLOCK_ROWS, row_count)
        query_index = tl.arange(0, BLOCK_QUERIES)
        local_row = first_row + query_index // GROUP
        head = kv_head * GROUP + query_index % GROUP
        row_mask = local_row < end_row
        dims = tl.arange(0, BLOCK_D)
        row_start = tl.load(row_starts_ptr + request).to(tl.int64)
        row = row_start + local_row
        query_mask = row_mask[:, None] & (dims < D)[None, :]
        q = tl.load(
            query_ptr + row[:, None] * stride_q_row + head[:, None] * stride_q_head + dims[None, :],
            mask=query_mask,
            other=0.0,
        )

        # Blocks low_block .. low_block + blocks - 1 hold the keys that some row sees; low_block
        # belongs to split 0. The last ones are the tail of a tree.
        first = tl.load(first_positions_ptr + request).to(tl.int32)
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
        tail_rows = 0
        if TREE:
            shared_blocks = tl.minimum(first // BLOCK_KEYS - low_block, blocks)
            tail_rows = end_row - first_row
        used_splits = tl.minimum(blocks, SPLITS)
        if PARALLEL:
            if split >= used_splits:
                return
        iterations = shared_blocks + (blocks - shared_blocks) * tail_rows
        shared_count = (shared_blocks - split + SPLITS - 1) // SPLITS  # blocks of this split
        if PARALLEL:
            has_tail = split + shared_count * SPLITS < blocks
            iterations = shared_count + tl.where(has_tail, tail_rows, 0)

        empty_max = tl.full([BLOCK_QUERIES], _UNSEEN_SCORE, tl.float32)
        sink = empty_max
        if SINKS:  # Split 0 counts the sink.
            sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
        sink_total = tl.where(sink > _UNSEEN_SCORE, 1.0, 0.0)
        max_score = tl.where(split == 0, sink, empty_max)
        total = tl.zeros([BLOCK_QUERIES, TOTAL_COLUMNS], tl.float32)
        total += tl.where(split == 0, sink_total, 0.0)[:, None]
        acc = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
        merged_max = empty_max
        merged_total = tl.zeros([BLOCK_QUERIES], tl.float32)
        merged = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
        ones = tl.full([BLOCK_KEYS, TOTAL_COLUMNS], 1.0, value_cache_ptr.dtype.element_ty)
        table_ptr = page_tables_ptr + request.to(tl.int64) * stride_table_row
        keys_ptr = key_cache_ptr + kv_head * stride_k_head + dims[None, :]
        values_ptr = value_cache_ptr + kv_head * stride_v_head + dims[None, :]
        index = 0  # of the iteration within its split
        for _ in range(iterations):
            if not PARALLEL:
                if index == 0 and split > 0:
                    merged, merged_max, merged_total = _merge_split(
                        merged, merged_max, merged_total, acc, max_score, tl.max(total, 1)
                    )
                    max_score = empty_max
                    total = tl.zeros([BLOCK_QUERIES, TOTAL_COLUMNS], tl.float32)
                    acc = tl.zeros([BLOCK_QUERIES, BLOCK_D], tl.float32)
            start = (low_block + split + tl.minimum(index, shared_count) * SPLITS) * BLOCK_KEYS
            key_position = start + tl.arange(0, BLOCK_KEYS)
            in_range = key_position < high
            kv_position = key_position
            sees_block = row_mask
            if TREE:
                tail_row = first_row + index - shared_count
                is_tail = index >= shared_count
                depth = key_position - first
                in_tree = is_tail & (depth >= 0) & in_range
                path_ptr = paths_ptr + (row_start + tail_row) * stride_path_row
                ancestor = tl.load(path_ptr + depth, mask=in_tree, other=0)
                kv_position = tl.where(in_tree, first + ancestor, key_position)
                in_range = in_range & (kv_position < table_end)
                sees_block = (local_row == tail_row) | (index < shared_count)
            page = tl.load(table_ptr + kv_position // PAGE_SIZE, mask=in_range, other=0)
            slot = (page.to(tl.int64) * PAGE_SIZE + kv_position % PAGE_SIZE)[:, None]
            key_mask = in_range[:, None] & (dims < D)[None, :]
            k = tl.load(keys_ptr + slot * stride_k_slot, mask=key_mask, other=0.0)  # [keys, d]
            # [queries, keys], as powers of 2
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            visible = key_position[None, :] > position[:, None] - window
            visible = visible & (key_position[None, :] <= position[:, None]) & in_range[None, :]
            if TREE:
                visible = visible & sees_block[:, None]
            scores = tl.where(visible, scores, _UNSEEN_SCORE)
            new_max = tl.maximum(max_score, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
            rescale = tl.exp2(max_score - new_max)[:, None]
            v = tl.load(values_ptr + slot * stride_v_slot, mask=key_mask, other=0.0)
            weights = weights.to(v.dtype)
            acc = tl.dot(weights, v, acc * rescale, input_precision="ieee")
            total = tl.dot(weights, ones, total * rescale, input_precision="ieee")
            max_score = new_max
            index += 1
            if not PARALLEL:
                has_tail = split + shared_count * SPLITS < blocks
                is_last = index == shared_count + tl.where(has_tail, tail_rows, 0)
                split = tl.where(is_last, split + 1, split)
                index = tl.where(is_last, 0, index)
                shared_count = (shared_blocks - split + SPLITS - 1) // SPLITS

        split_total = tl.max(total, 1)
        if PARALLEL:
            part = (row * HEADS + head) * SPLITS
            tl.store(max_ptr + part + split, max_score, mask=row_mask)
            tl.store(sum_ptr + part + split, split_total, mask=row_mask)
            tl.store(part_ptr + (part + split)[:, None] * D + dims[None, :], acc, mask=query_mask)
            tl.debug_barrier()  # Every thread has stored.
            query_blocks = tl.num_programs(2) // SPLITS
            counter = (request * tl.num_programs(1) + tl.program_id(1)) * query_blocks + block
            if tl.atomic_add(counters_ptr + counter, 1) < used_splits - 1:
                return
            tl.store(counters_ptr + counter, 0)  # for the next launch
            for i in range(used_splits):
                split_max = tl.load(
                    max_ptr + part + i, mask=row_mask, other=_UNSEEN_SCORE, cache_modifier=".cg"
                )
                split_sum = tl.load(
                    sum_ptr + part + i, mask=row_mask, other=0.0, cache_modifier=".cg"
                )
                split_acc = tl.load(
                    part_ptr + (part + i)[:, None] * D + dims[None, :],
                    mask=query_mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
                merged, merged_max, merged_total = _merge_split(
                    merged, merged_max, merged_total, split_acc, split_max, split_sum
                )
        else:
            merged, merged_max, merged_total = _merge_split(
                merged, merged_max, merged_total, acc, max_score, split_total
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
    batch, pages = rows.page_tables.shape
    heads, d = query.shape[1:]
    kv_heads = key_cache.shape[1]
    is_tree = rows.tree_masks is not None
    plan = plan or plan_attention(
        batch * kv_heads, rows.max_rows, heads // kv_heads, query, is_tree
    )
    blocks = triton.cdiv(rows.max_rows, plan.block_rows)
    counters = new_split_counters(query.device) if split_counters is None else split_counters
    assert not plan.parallel or batch * kv_heads * blocks <= len(counters)
    paths = tree_paths(rows) if is_tree else rows.row_starts[:, None]
    block_d = max(16, triton.next_power_of_2(d))
    grid = (batch, kv_heads, blocks * (KEY_SPLITS if plan.parallel else 1))
    _invariant_attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        rows.page_tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        query if params.sinks is None else params.sinks,
        rows.positions,
        paths,
        out,
        *_split_buffers(out, plan.parallel),
        counters,
        params.scale * LOG2_E,
        params.window_size,
        pages,
        *query.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        rows.page_tables.stride(0),
        paths.stride(0),
        *out.stride()[:2],
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=d,
        PAGE_SIZE=rows.page_size,
        SPLITS=KEY_SPLITS,
        PARALLEL=plan.parallel,
        SINKS=params.sinks is not None,
        TREE=is_tree,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_QUERIES=plan.block_queries,
        BLOCK_KEYS=64 if block_d <= 128 else 32,
        BLOCK_D=block_d,
        TOTAL_COLUMNS=TOTAL_COLUMNS,
        num_warps=4 if plan.block_queries == 64 and block_d <= 128 else 8,
        num_stages=3 if plan.block_queries == 64 else 2,
        enable_fp_fusion=False,  # The merges of both kinds of programs must round alike.
        **launch_options(query),
    )
    return out


def plan_attention(
    heads_in_batch: int, max_rows: int, group: int, query: Tensor, is_tree: bool
) -> AttentionPlan:
    """How many rows a block has, and whether splits have their own programs. No bit depends on it.

    A small batch is spread over the GPU. Rows of a tree prefer blocks of few rows, because their
    tails are processed one after another.
    """
    most = MAX_BLOCK_QUERIES if query.element_size() == 2 else MAX_BLOCK_QUERIES_FLOAT32
    smallest = max(MIN_BLOCK_QUERIES, triton.next_power_of_2(group))
    choices = [smallest]
    while choices[-1] < min(most, triton.next_power_of_2(max_rows * group)):
        choices.append(2 * choices[-1])
    row_choices = [(queries // group, queries) for queries in choices]
    if is_tree and smallest // group > 1:
        row_choices.insert(0, (1, smallest))
    for block_rows, block_queries in row_choices:
        programs = heads_in_batch * triton.cdiv(max_rows, block_rows)
        if programs <= BUSY_PROGRAMS:
            break
    parallel = programs <= BUSY_PROGRAMS and programs <= SPLIT_COUNTERS
    return AttentionPlan(block_rows, block_queries, parallel)


def _split_buffers(out: Tensor, parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What splits store: sums of values, largest scores and total weights."""
    if not parallel:
        return out, out, out
    rows, heads, d = out.shape
    sums = torch.empty(rows, heads, KEY_SPLITS, d, dtype=torch.float32, device=out.device)
    maxima = sums.new_empty(rows, heads, KEY_SPLITS)
    return sums, maxima, torch.empty_like(maxima)

"""Attention of a ragged batch over paged keys and values: for verification, drafting and prefill.

The rows and their visibility are those of RowPass (peagle/kernels/row_pass.py): request b owns the
rows query[row_starts[b] : row_starts[b] + row_counts[b]]. Its row i has position
p = first_positions[b] + i and attends to the positions max(0, p - window + 1) .. p of its request.
The key and value of position j lie in the KV slot

    page_tables[b, j // page_size] * page_size + j % page_size

    page_size=4, page_tables[b] = 7 2 5, first_positions[b] = 5, row_counts[b] = 2, window=3:

    row   position   attends to positions   in slots
    0     5          3 4 5                  31 8 9
    1     6          4 5 6                  8 9 10

The rows of a draft tree attend to every position before first_positions[b] (within the window) and
to the rows of the tree that have a bit in `tree_masks`.

A program computes one (request, key/value head, block of query rows). The rows of a block are
(query row, head of the group), so that a group shares what is loaded; a block has at least the 16
rows that tensor cores need. The softmax is computed online in float32.

If there are few requests, `splits` programs share the keys of a block: split s reads every
splits-th block of keys. Each stores its unnormalized sum, its largest score and its total weight,
and the last one to finish merges them. The order in which a row is summed therefore depends on its
position, not on its neighbors.

Shapes: query and result [T, heads, d], key_cache and value_cache [num_slots, kv_heads, d].
"""

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.cpu import ops
from peagle.kernels.row_pass import RowPass, visible_keys
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.attention.attention_plan import (
    LOG2_E,
    UNSEEN_SCORE,
    LaunchPlan,
    block_sizes,
    new_split_counters,
    plan_launch,
    score_scales,
    split_buffers,
)
from peagle.kernels.triton.attention.rotary_rows import Rotation, rotation_arguments
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.attention.attention_blocks import (
        merge_splits,
        visible_to_rows,
    )
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
    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor | None = None,
) -> Tensor:
    """The same computation in plain PyTorch and float32."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    kv_heads = key_cache.shape[1]
    page_size = rows.page_size
    starts, counts, firsts = (
        x.tolist() for x in (rows.row_starts, rows.row_counts, rows.first_positions)
    )
    for b, (start, count, first) in enumerate(zip(starts, counts, firsts, strict=True)):
        if count == 0:
            continue
        page_table = rows.page_tables[b].long()
        own_rows = slice(start, start + count)
        end = min(first + count, len(page_table) * page_size)
        key_positions = torch.arange(end, device=query.device)
        slots = page_table[key_positions // page_size] * page_size + key_positions % page_size
        k = key_cache[slots].float()  # [keys, kv_heads, d]
        v = value_cache[slots].float()
        q = query[own_rows].float().unflatten(1, (kv_heads, -1))  # [rows, kv_heads, group, d]
        scores = torch.einsum("rhgd,khd->rhgk", q, k) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        tree = None
        if rows.tree_masks is not None:
            tree = (rows.tree_masks[own_rows], rows.positions[own_rows])
        visible = visible_keys(
            first, count, key_positions, params.window_size, tree, rows.bidirectional_rows
        )
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        if params.sinks is not None:
            sinks = params.sinks.float().view(kv_heads, -1, 1).expand(count, -1, -1, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : len(key_positions)].nan_to_num()
        result = torch.einsum("rhgk,khd->rhgd", weights, v)
        out[own_rows] = result.flatten(1, 2).to(query.dtype)
    return out


if triton is not None:
    _LOG2_E = tl.constexpr(LOG2_E)
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)

    @triton.jit
    def _paged_attention_kernel(  # type: ignore[no-untyped-def]
        query_ptr,
        key_cache_ptr,
        value_cache_ptr,
        page_tables_ptr,
        row_starts_ptr,
        row_counts_ptr,
        first_positions_ptr,
        sinks_ptr,
        tree_masks_ptr,
        positions_ptr,
        out_ptr,
        part_ptr,
        max_ptr,
        sum_ptr,
        counters_ptr,
        scale,
        softcap,
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
        SPLITS: tl.constexpr,
        SOFTCAP: tl.constexpr,
        SINKS: tl.constexpr,
        TREE: tl.constexpr,
        BIDIRECTIONAL_ROWS: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        request = tl.program_id(0)
        kv_head = tl.program_id(1).to(tl.int64)
        block = tl.program_id(2) // SPLITS
        split = tl.program_id(2) % SPLITS
        row_count = tl.load(row_counts_ptr + request).to(tl.int32)
        first_row = tl.load(row_starts_ptr + request).to(tl.int64)
        first = tl.load(first_positions_ptr + request).to(tl.int32)
        query_index = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_D)
        local_row = query_index // GROUP
        head = kv_head * GROUP + query_index % GROUP
        row = first_row + local_row
        row_mask = local_row < row_count
        query_mask = row_mask[:, None] & (dims < D)[None, :]
        keys_ptr = key_cache_ptr + kv_head * stride_k_head + dims[None, :]
        values_ptr = value_cache_ptr + kv_head * stride_v_head + dims[None, :]
        end_row = tl.minimum((block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP + 1, row_count)
        if ROTATE:
            sizes: tl.constexpr = QkvSizes(
                HEADS, GROUP, D, ROT, SUMS, SPLITS, TREE, BLOCK_KEYS, BLOCK_NEW, BLOCK_D
            )
            rope = RopeTable(positions_ptr, rope_table_ptr, stride_rope_row, max_positions)
            product = QkvProduct(query_ptr, stride_q_split, stride_q_row)
            dtype = key_cache_ptr.dtype.element_ty
            q_position = load_positions(rope, row, row_mask)
            q_angles = load_angles(rope, q_position, row_mask, sizes, dtype)
            cache = HeadCache(keys_ptr, values_ptr, stride_k_slot, stride_v_slot, kv_slots_ptr)
            new_rows = NewRows(first_row, first, end_row, split, kv_head)
            new_block = load_new_block(rope, new_rows, cache, 0, sizes, dtype)
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        if block * BLOCK_ROWS >= row_count * GROUP:
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

        position = first + local_row
        last = position
        tree_bits = position
        # Keys low .. high - 1 are visible to some row of the block.
        low = tl.maximum(first + block * BLOCK_ROWS // GROUP - window + 1, 0)
        high = first + end_row
        if BIDIRECTIONAL_ROWS > 0:
            in_both_ways = local_row >= row_count - BIDIRECTIONAL_ROWS
            last = first + tl.where(in_both_ways, row_count - 1, local_row)
            high = first + row_count
        if TREE:
            position = tl.load(positions_ptr + row, mask=row_mask, other=0).to(tl.int32)
            tree_bits = tl.load(tree_masks_ptr + row, mask=row_mask, other=0)
            low = tl.maximum(first - window + 1, 0)
        high = tl.minimum(high, pages * PAGE_SIZE)
        # Whole blocks of keys, the first of which belongs to split 0.
        low = low // BLOCK_KEYS // SPLITS * SPLITS * BLOCK_KEYS

        max_score = tl.full([BLOCK_ROWS], _UNSEEN_SCORE, tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        if SINKS:  # Split 0 counts the sink.
            sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
            max_score = tl.where(split == 0, sink, max_score)
            total = tl.where(split == 0, 1.0, total)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        table_ptr = page_tables_ptr + request.to(tl.int64) * stride_table_row
        for start in range(low + split * BLOCK_KEYS, high, SPLITS * BLOCK_KEYS):
            key_position = start + tl.arange(0, BLOCK_KEYS)
            in_range = key_position < high
            page = tl.load(table_ptr + key_position // PAGE_SIZE, mask=in_range, other=0)
            slot = (page.to(tl.int64) * PAGE_SIZE + key_position % PAGE_SIZE)[:, None]
            key_mask = in_range[:, None] & (dims < D)[None, :]
            k = tl.load(keys_ptr + slot * stride_k_slot, mask=key_mask, other=0.0)  # [keys, d]
            # [rows, keys], as powers of 2
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1); scale contains the 2 / softcap
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
            visible = visible_to_rows(key_position, first, position, last, tree_bits, window, TREE)
            scores = tl.where(visible & in_range[None, :], scores, _UNSEEN_SCORE)
            new_max = tl.maximum(max_score, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
            rescale = tl.exp2(max_score - new_max)
            v = tl.load(values_ptr + slot * stride_v_slot, mask=key_mask, other=0.0)
            acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            total = total * rescale + tl.sum(weights, 1)
            max_score = new_max

        if SPLITS > 1:
            part = (row * HEADS + head) * SPLITS
            tl.store(max_ptr + part + split, max_score, mask=row_mask)
            tl.store(sum_ptr + part + split, total, mask=row_mask)
            tl.store(part_ptr + (part + split)[:, None] * D + dims[None, :], acc, mask=query_mask)
            tl.debug_barrier()  # Every thread has stored.
            blocks = tl.num_programs(2) // SPLITS
            counter = (request * tl.num_programs(1) + tl.program_id(1)) * blocks + block
            if tl.atomic_add(counters_ptr + counter, 1) < SPLITS - 1:
                return
            tl.store(counters_ptr + counter, 0)  # for the next launch
            acc, total = merge_splits(
                part_ptr, max_ptr, sum_ptr, part, row_mask, query_mask, dims, D, SPLITS
            )
        result = (acc / tl.maximum(total, 1e-9)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + row[:, None] * stride_o_row + head[:, None] * stride_o_head + dims[None, :],
            result,
            mask=query_mask,
        )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor | None = None,
    split_counters: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Run the kernel, or its counterpart on a CPU. The last dimension of tensors is contiguous.

    Caches must be finite wherever a page table points: a masked key is still multiplied, by 0. Rows
    that belong to no request are zeros; with `out`, they stay what they were. A position behind the
    table's last page attends to what the table holds; its result is meaningless, but finite.
    `split_counters` (see `new_split_counters`) must not be used by another launch at the same time.
    """
    if not uses_triton(query):
        return _attend_on_cpu(query, key_cache, value_cache, rows, params, out)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format) if out is None else out
    assert query.shape[1] % key_cache.shape[1] == 0
    assert key_cache.shape == value_cache.shape and out.shape == query.shape
    tensors = (query, key_cache, value_cache, out, rows.page_tables)
    assert all(x.stride(-1) == 1 for x in tensors)
    launch_attention(query, key_cache, value_cache, rows, params, out, split_counters, splits)
    return out


def _attend_on_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor | None,
) -> Tensor:
    into = torch.zeros_like(query, memory_format=torch.contiguous_format) if out is None else out
    if ops.attend(query, key_cache, value_cache, rows, params, into):
        return into
    return reference(query, key_cache, value_cache, rows, params, out)


def plan_pass(
    rows: RowPass, num_heads: int, key_cache: Tensor, splits: int | None = None
) -> LaunchPlan:
    kv_heads = key_cache.shape[1]
    queries = rows.max_rows * num_heads // kv_heads
    heads_in_batch = len(rows.page_tables) * kv_heads
    return plan_launch(heads_in_batch, queries, key_cache.element_size(), splits)


def launch_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor,
    split_counters: Tensor | None,
    splits: int | None = None,
    rotation: Rotation | None = None,
) -> None:
    """`rotation`: query is `rotation.query`, and new keys and values are not in the caches yet."""
    batch = len(rows.page_tables)
    kv_heads = key_cache.shape[1]
    plan = plan_pass(rows, out.shape[1], key_cache, splits)
    counters = new_split_counters(out.device) if split_counters is None else split_counters
    assert plan.splits == 1 or batch * kv_heads * plan.blocks <= len(counters)
    _paged_attention_kernel[(batch, kv_heads, plan.blocks * plan.splits)](
        query,
        key_cache,
        value_cache,
        rows.page_tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        query if params.sinks is None else params.sinks,
        rows.tree_masks,
        rows.positions,
        out,
        *split_buffers(out, plan.splits),
        counters,
        *score_scales(params),
        params.window_size,
        rows.page_tables.shape[1],
        *query.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        rows.page_tables.stride(0),
        *out.stride()[:2],
        SOFTCAP=params.softcap is not None,
        SINKS=params.sinks is not None,
        TREE=rows.tree_masks is not None,
        BIDIRECTIONAL_ROWS=rows.bidirectional_rows,
        PAGE_SIZE=rows.page_size,
        **rotation_arguments(rotation, rows),
        **block_sizes(out, kv_heads, plan),
        **launch_options(out),
    )

"""Rotary embedding, the new keys and values, and attention over pages: one launch for a few rows.

It computes what rope_store.py and paged_attention.py compute one after the other, to the same bits.
A program rotates the queries of its block itself. The new rows of its request lie among the keys
from first_positions[b] on: a program that reads such a block of keys computes them from qkv, and
does not read what another program is storing at that time.

    first_positions[b] = 70, row_counts[b] = 2, blocks of 64 keys:

    block of keys    positions 0 .. 63    positions 64 .. 71
    keys from        the cache            the cache up to 69; 70 and 71 from qkv

The programs of the last block of queries store the new keys and values. As several programs rotate
the same heads, this is for few rows only.

Shapes: qkv [T, (H + 2 Hkv) d] or partial sums [S, T, (H + 2 Hkv) d] (skinny_gemm.py), rope_table
[max_positions, d], caches [num_slots, Hkv, d]. Result [T, H, d]; d is a power of 2.
"""

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import paged_attention, rope_store, uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options
from peagle.kernels.triton.paged_attention import (
    LOG2_E,
    UNSEEN_SCORE,
    _block_sizes,
    _score_scales,
    _split_buffers,
    new_split_counters,
    plan_launch,
)

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import (
        launch_next,
        launch_next_early,
        wait_for_inputs,
    )
    from peagle.kernels.triton.paged_attention import _merge_splits, _visible_keys
    from peagle.kernels.triton.rope_store import _load_sum, _scale_by_norm, _sum_of_squares
except ImportError:  # without Triton the reference runs
    triton = None

MAX_ROWS = 16  # of a pass


def reference(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
    params: AttentionParams,
) -> Tensor:
    """The same computation in plain PyTorch."""
    query = rope_store.reference(qkv, rows, rope_table, key_cache, value_cache, heads)
    return paged_attention.reference(query, key_cache, value_cache, rows, params)


def supports_rope_attention(qkv: Tensor, rope_table: Tensor, key_cache: Tensor) -> bool:
    """Whether the kernel supports this pass and is faster than two launches."""
    d = key_cache.shape[2]
    whole = rope_table.shape[1] == d and d >= 16 and d & (d - 1) == 0
    return uses_triton(qkv) and whole and qkv.shape[-2] <= MAX_ROWS


if triton is not None:
    _LOG2_E = tl.constexpr(LOG2_E)
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)

    @triton.jit
    def _rotated_heads(  # type: ignore[no-untyped-def]
        head_ptr,
        stride_split,
        mask,
        angles_ptr,
        norm_ptr,
        eps,
        D: tl.constexpr,
        NORM: tl.constexpr,
        SPLITS: tl.constexpr,
        dtype: tl.constexpr,
    ):
        """[rows, D]: a head per row, which begins at head_ptr [rows]; rounded as in rope_store."""
        HALF: tl.constexpr = D // 2
        dims = tl.arange(0, HALF)
        mask = mask[:, None] & (dims < HALF)[None, :]
        left_ptr = head_ptr[:, None] + dims[None, :]
        left = _load_sum(left_ptr, stride_split, mask, SPLITS, dtype)
        right = _load_sum(left_ptr + HALF, stride_split, mask, SPLITS, dtype)
        if NORM:
            x, y = left.to(tl.float32), right.to(tl.float32)
            square = (_sum_of_squares(x) + _sum_of_squares(y)).to(tl.float32)
            scale = tl.rsqrt(square / D + eps)[:, None]
            left = _scale_by_norm(x, scale, norm_ptr, dims, dims < HALF, dtype)
            right = _scale_by_norm(y, scale, norm_ptr + HALF, dims, dims < HALF, dtype)
        cos = tl.load(angles_ptr[:, None] + dims[None, :], mask=mask, other=0.0)
        cos = cos.to(dtype).to(tl.float32)
        sin = tl.load(angles_ptr[:, None] + HALF + dims[None, :], mask=mask, other=0.0)
        sin = sin.to(dtype).to(tl.float32)
        x, y = left.to(tl.float32), right.to(tl.float32)
        new_left = (x * cos).to(dtype).to(tl.float32) - (y * sin).to(dtype).to(tl.float32)
        new_right = (y * cos).to(dtype).to(tl.float32) + (x * sin).to(dtype).to(tl.float32)
        halves = tl.permute(tl.join(new_left.to(dtype), new_right.to(dtype)), (0, 2, 1))
        return tl.reshape(halves, (head_ptr.shape[0], D))

    @triton.jit
    def _attend_block(  # type: ignore[no-untyped-def]
        q, k, v, visible, max_score, total, acc, scale, softcap, SOFTCAP: tl.constexpr
    ):
        """One step of the online softmax, over a block of keys, as in paged_attention."""
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        scores = tl.where(visible, scores, _UNSEEN_SCORE)
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(max_score - new_max)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        return new_max, total * rescale + tl.sum(weights, 1), acc

    @triton.jit
    def _rope_attention_kernel(  # type: ignore[no-untyped-def]
        qkv_ptr,
        rope_table_ptr,
        q_norm_ptr,
        k_norm_ptr,
        kv_slots_ptr,
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
        eps,
        max_positions,
        scale,
        softcap,
        window,
        pages,
        stride_qkv_split,
        stride_qkv_row,
        stride_rope_row,
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
        Q_NORM: tl.constexpr,
        K_NORM: tl.constexpr,
        SUMS: tl.constexpr,
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
        launch_next_early(DEPENDENT)
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        request = tl.program_id(0)
        kv_head = tl.program_id(1).to(tl.int64)
        block = tl.program_id(2) // SPLITS
        split = tl.program_id(2) % SPLITS
        row_count = tl.load(row_counts_ptr + request).to(tl.int32)
        if block * BLOCK_ROWS >= row_count * GROUP:
            return
        dtype: tl.constexpr = key_cache_ptr.dtype.element_ty
        query_index = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_D)
        local_row = query_index // GROUP
        head = kv_head * GROUP + query_index % GROUP
        first_row = tl.load(row_starts_ptr + request).to(tl.int64)
        row = first_row + local_row
        row_mask = local_row < row_count
        query_mask = row_mask[:, None] & (dims < D)[None, :]
        row_position = tl.load(positions_ptr + row, mask=row_mask, other=0).to(tl.int64)
        angle_row = tl.minimum(row_position, max_positions - 1)
        q = _rotated_heads(
            qkv_ptr + row * stride_qkv_row + head * D,
            stride_qkv_split,
            row_mask,
            rope_table_ptr + angle_row * stride_rope_row,
            q_norm_ptr,
            eps,
            D,
            Q_NORM,
            SUMS,
            dtype,
        )

        first = tl.load(first_positions_ptr + request).to(tl.int32)
        position = first + local_row
        last = position
        tree_bits = position
        # Keys low .. high - 1 are visible to some row of the block.
        low = tl.maximum(first + block * BLOCK_ROWS // GROUP - window + 1, 0)
        high = first + tl.minimum((block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP + 1, row_count)
        if BIDIRECTIONAL_ROWS > 0:
            in_both_ways = local_row >= row_count - BIDIRECTIONAL_ROWS
            last = first + tl.where(in_both_ways, row_count - 1, local_row)
            high = first + row_count
        if TREE:
            position = row_position.to(tl.int32)
            tree_bits = tl.load(tree_masks_ptr + row, mask=row_mask, other=0)
            low = tl.maximum(first - window + 1, 0)
        high = tl.minimum(high, pages * PAGE_SIZE)
        # The last block of queries has all new rows, and stores them.
        stores = (block + 1) * BLOCK_ROWS >= row_count * GROUP
        if stores:
            low = tl.minimum(low, first)
        # Whole blocks of keys, the first of which belongs to split 0.
        low = low // BLOCK_KEYS // SPLITS * SPLITS * BLOCK_KEYS + split * BLOCK_KEYS

        max_score = tl.full([BLOCK_ROWS], _UNSEEN_SCORE, tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        if SINKS:  # Split 0 counts the sink.
            sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
            max_score = tl.where(split == 0, sink, max_score)
            total = tl.where(split == 0, 1.0, total)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        table_ptr = page_tables_ptr + request.to(tl.int64) * stride_table_row
        keys_ptr = key_cache_ptr + kv_head * stride_k_head + dims[None, :]
        values_ptr = value_cache_ptr + kv_head * stride_v_head + dims[None, :]
        STEP: tl.constexpr = SPLITS * BLOCK_KEYS
        old_end = tl.minimum(high, first) // BLOCK_KEYS * BLOCK_KEYS
        for start in range(low, old_end, STEP):
            key_position = start + tl.arange(0, BLOCK_KEYS)
            page = tl.load(table_ptr + key_position // PAGE_SIZE)
            slot = (page.to(tl.int64) * PAGE_SIZE + key_position % PAGE_SIZE)[:, None]
            k = tl.load(keys_ptr + slot * stride_k_slot)  # [keys, d]
            v = tl.load(values_ptr + slot * stride_v_slot)
            visible = _visible_keys(key_position, first, position, last, tree_bits, window, TREE)
            max_score, total, acc = _attend_block(
                q, k, v, visible, max_score, total, acc, scale, softcap, SOFTCAP
            )

        # Blocks with new keys.
        new_start = low + tl.maximum(old_end - low + STEP - 1, 0) // STEP * STEP
        for start in tl.range(new_start, high, STEP, num_stages=1):
            key_position = start + tl.arange(0, BLOCK_KEYS)
            in_range = key_position < high
            is_new = in_range & (key_position >= first)
            is_old = in_range & (key_position < first)
            page = tl.load(table_ptr + key_position // PAGE_SIZE, mask=is_old, other=0)
            slot = (page.to(tl.int64) * PAGE_SIZE + key_position % PAGE_SIZE)[:, None]
            k = tl.load(keys_ptr + slot * stride_k_slot, mask=is_old[:, None], other=0.0)
            v = tl.load(values_ptr + slot * stride_v_slot, mask=is_old[:, None], other=0.0)
            new_row = first_row + tl.where(is_new, key_position - first, 0)
            new_position = tl.load(positions_ptr + new_row, mask=is_new, other=0).to(tl.int64)
            new_angle_row = tl.minimum(new_position, max_positions - 1)
            new_head_ptr = qkv_ptr + new_row * stride_qkv_row + (HEADS + kv_head) * D
            new_k = _rotated_heads(
                new_head_ptr,
                stride_qkv_split,
                is_new,
                rope_table_ptr + new_angle_row * stride_rope_row,
                k_norm_ptr,
                eps,
                D,
                K_NORM,
                SUMS,
                dtype,
            )
            new_v = _load_sum(
                new_head_ptr[:, None] + (HEADS // GROUP) * D + dims[None, :],
                stride_qkv_split,
                is_new[:, None],
                SUMS,
                dtype,
            )
            if stores:
                new_slot = tl.load(kv_slots_ptr + new_row, mask=is_new, other=-1).to(tl.int64)
                stored = (new_slot >= 0)[:, None]
                tl.store(keys_ptr + new_slot[:, None] * stride_k_slot, new_k, mask=stored)
                tl.store(values_ptr + new_slot[:, None] * stride_v_slot, new_v, mask=stored)
            k = tl.where(is_new[:, None], new_k, k)
            v = tl.where(is_new[:, None], new_v, v)
            visible = _visible_keys(key_position, first, position, last, tree_bits, window, TREE)
            visible = visible & in_range[None, :]
            max_score, total, acc = _attend_block(
                q, k, v, visible, max_score, total, acc, scale, softcap, SOFTCAP
            )

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
            acc, total = _merge_splits(
                part_ptr,
                max_ptr,
                sum_ptr,
                part,
                row_mask,
                query_mask,
                dims,
                D,
                SPLITS,
                BLOCK_ROWS,
                BLOCK_D,
            )
        result = (acc / tl.maximum(total, 1e-9)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + row[:, None] * stride_o_row + head[:, None] * stride_o_head + dims[None, :],
            result,
            mask=query_mask,
        )


def rope_attention(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
    params: AttentionParams,
    split_counters: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """[T, H, d]; see `supports_rope_attention`, rope_store and paged_attention for conditions.

    Rows that belong to no request get no result.
    """
    if not uses_triton(qkv):
        return reference(qkv, rows, rope_table, key_cache, value_cache, heads, params)
    batch = len(rows.page_tables)
    kv_heads, d = key_cache.shape[1:]
    group = heads.num_heads // kv_heads
    out = torch.empty(qkv.shape[-2], heads.num_heads, d, dtype=key_cache.dtype, device=qkv.device)
    plan = plan_launch(batch * kv_heads, rows.max_rows * group, out.element_size(), splits)
    counters = new_split_counters(out.device) if split_counters is None else split_counters
    assert plan.splits == 1 or batch * kv_heads * plan.blocks <= len(counters)
    assert qkv.stride(-1) == key_cache.stride(2) == value_cache.stride(2) == 1
    assert key_cache.shape == value_cache.shape and key_cache.dtype == value_cache.dtype
    assert rope_table.stride(1) == rows.page_tables.stride(1) == 1
    _rope_attention_kernel[(batch, kv_heads, plan.blocks * plan.splits)](
        qkv,
        rope_table,
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        rows.kv_slots,
        key_cache,
        value_cache,
        rows.page_tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        qkv if params.sinks is None else params.sinks,
        rows.tree_masks,
        rows.positions,
        out,
        *_split_buffers(out, plan.splits),
        counters,
        heads.eps,
        len(rope_table),
        *_score_scales(params),
        params.window_size,
        rows.page_tables.shape[1],
        qkv.stride(0),
        qkv.stride(-2),
        rope_table.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        rows.page_tables.stride(0),
        *out.stride()[:2],
        Q_NORM=heads.q_norm is not None,
        K_NORM=heads.k_norm is not None,
        SUMS=1 if qkv.dim() == 2 else len(qkv),
        SOFTCAP=params.softcap is not None,
        SINKS=params.sinks is not None,
        TREE=rows.tree_masks is not None,
        BIDIRECTIONAL_ROWS=rows.bidirectional_rows,
        PAGE_SIZE=rows.page_size,
        **_block_sizes(out, kv_heads, plan),
        **launch_options(qkv, "attention"),
    )
    return out

"""Rotary embedding of q and k, and the new keys and values stored in their KV slots: one launch.

It follows the rotate-half convention: dimension i rotates with dimension i + rot/2, and dimensions
from rot on do not rotate (partial rotary). With a head norm (Qwen3), each head is RMS-normed before
it rotates. Results are rounded where transformers rounds: cos and sin to the tensors' dtype, then
each product, then the sum.

    d=4, rot=2, head (x0 x1 x2 x3)  ->  (x0 cos - x1 sin, x1 cos + x0 sin, x2, x3)

A program computes a few heads of one row. The heads of queries, keys and values belong to different
programs. A thread stores the two elements that it has loaded, so no program reads rotated values.

Shapes: qkv [T, (H + 2 Hkv) d] with the heads of q, k, v in this order; rows.positions [T] and
rows.kv_slots [T] (slot -1: nothing is stored); rope_table [max_positions, rot] float32 (cosines of
rot/2 frequencies, then sines); caches [num_slots, Hkv, d]; norms [d]. qkv may come as partial sums
[S, T, (H + 2 Hkv) d] (skinny_gemm.py): they are added first, and q gets a tensor of its own.
"""

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads
from peagle.kernels.cpu import ops
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.attention.rotary_rows import load_sum, rounded_product
    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

HEADS_PER_PROGRAM = 4


def reference(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
) -> Tensor:
    """The same computation in plain PyTorch."""
    qkv = qkv if qkv.dim() == 2 else qkv.sum(0).to(key_cache.dtype)
    cos, sin = rows.rotary_angles(rope_table, qkv.dtype)
    half = cos.shape[-1]
    d = key_cache.shape[2]
    kv_heads = heads.num_kv_heads
    qkv_heads = qkv.unflatten(1, (-1, d))
    q, k, v = qkv_heads.split([heads.num_heads, kv_heads, kv_heads], 1)  # views: [T, heads, d]
    qk = qkv_heads[:, : heads.num_heads + kv_heads]
    if heads.q_norm is not None or heads.k_norm is not None:
        qk = torch.cat(
            [_rms_norm(q, heads.q_norm, heads.eps), _rms_norm(k, heads.k_norm, heads.eps)], 1
        )
    left, right, rest = qk.split([half, half, d - 2 * half], -1)
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)
    new_q, new_k = rotated.to(qkv.dtype).split([heads.num_heads, kv_heads], 1)
    kv_slots = rows.kv_slots
    stored = kv_slots >= 0
    if not bool(stored.all()):
        kv_slots, new_k, v = kv_slots[stored], new_k[stored], v[stored]
    key_cache[kv_slots.long()] = new_k
    value_cache[kv_slots.long()] = v
    q.copy_(new_q)
    return qkv_heads[:, : heads.num_heads]


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


if triton is not None:

    @triton.jit
    def _scale_by_norm(x, scale, weight, dtype):  # type: ignore[no-untyped-def]
        return (weight.to(tl.float32)[None, :] * (x * scale).to(dtype).to(tl.float32)).to(dtype)

    @triton.jit
    def _load_angles(ptr, dims, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
        """The cosines and sines of a position."""
        cos = tl.load(ptr + dims, mask=dims < HALF, other=0.0)
        sin = tl.load(ptr + HALF + dims, mask=dims < HALF, other=0.0)
        return cos, sin

    @triton.jit
    def _norm_scale(x, y, z, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
        """The factor of an RMS norm over the three parts of each head."""
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
        return tl.rsqrt(square / D + eps)[:, None]

    @triton.jit
    def _rotate_halves(left, right, cos, sin, dtype):  # type: ignore[no-untyped-def]
        """Rotated halves in float32; products are rounded to dtype."""
        cos, sin = cos.to(dtype)[None, :], sin.to(dtype)[None, :]
        new_left = rounded_product(left, cos, dtype) - rounded_product(right, sin, dtype)
        new_right = rounded_product(right, cos, dtype) + rounded_product(left, sin, dtype)
        return new_left, new_right

    @triton.jit
    def _rotate_heads(  # type: ignore[no-untyped-def]
        source_ptr,
        stride_split,
        target_ptr,
        stride_target_head,
        norm_ptr,
        angles_ptr,
        head,
        head_mask,
        eps,
        D: tl.constexpr,
        ROT: tl.constexpr,
        NORM: tl.constexpr,
        SPLITS: tl.constexpr,
        BLOCK_HALF: tl.constexpr,
        BLOCK_REST: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        """Rotate heads [BLOCK_HEADS] of one row; the heads of the source are contiguous.

        The source is read after `wait_for_inputs`, everything else before.
        """
        HALF: tl.constexpr = ROT // 2
        dims = tl.arange(0, BLOCK_HALF)
        rest_dims = ROT + tl.arange(0, BLOCK_REST)
        half_mask = head_mask[:, None] & (dims < HALF)[None, :]
        rest_mask = head_mask[:, None] & (rest_dims < D)[None, :]
        source = source_ptr + head[:, None] * D
        target = target_ptr + head[:, None].to(tl.int64) * stride_target_head
        dtype = target_ptr.dtype.element_ty
        cos, sin = _load_angles(angles_ptr, dims, HALF)
        if NORM:
            left_norm = tl.load(norm_ptr + dims, mask=dims < HALF, other=0.0)
            right_norm = tl.load(norm_ptr + HALF + dims, mask=dims < HALF, other=0.0)
            rest_norm = tl.load(norm_ptr + rest_dims, mask=rest_dims < D, other=0.0)
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        left = load_sum(source + dims[None, :], stride_split, half_mask, SPLITS, dtype)
        right = load_sum(source + HALF + dims[None, :], stride_split, half_mask, SPLITS, dtype)
        rest = load_sum(source + rest_dims[None, :], stride_split, rest_mask, SPLITS, dtype)
        if NORM:
            x, y, z = left.to(tl.float32), right.to(tl.float32), rest.to(tl.float32)
            scale = _norm_scale(x, y, z, eps, D)
            left = _scale_by_norm(x, scale, left_norm, dtype)
            right = _scale_by_norm(y, scale, right_norm, dtype)
            rest = _scale_by_norm(z, scale, rest_norm, dtype)
        new_left, new_right = _rotate_halves(left, right, cos, sin, dtype)
        tl.store(target + dims[None, :], new_left.to(dtype), mask=half_mask)
        tl.store(target + HALF + dims[None, :], new_right.to(dtype), mask=half_mask)
        tl.store(target + rest_dims[None, :], rest, mask=rest_mask)

    @triton.jit
    def _rope_store_kernel(  # type: ignore[no-untyped-def]
        qkv_ptr,
        query_ptr,
        positions_ptr,
        kv_slots_ptr,
        rope_table_ptr,
        key_cache_ptr,
        value_cache_ptr,
        q_norm_ptr,
        k_norm_ptr,
        eps,
        max_positions,
        stride_qkv_split,
        stride_qkv_row,
        stride_q_row,
        stride_rope_row,
        stride_k_slot,
        stride_k_head,
        stride_v_slot,
        stride_v_head,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        D: tl.constexpr,
        ROT: tl.constexpr,
        Q_NORM: tl.constexpr,
        K_NORM: tl.constexpr,
        SPLITS: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_HALF: tl.constexpr,
        BLOCK_REST: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
        Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
        KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
        position = tl.minimum(tl.load(positions_ptr + row).to(tl.int64), max_positions - 1)
        angles_ptr = rope_table_ptr + position * stride_rope_row
        row_ptr = qkv_ptr + row * stride_qkv_row
        if block < Q_BLOCKS:
            head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            _rotate_heads(
                row_ptr,
                stride_qkv_split,
                query_ptr + row * stride_q_row,
                D,
                q_norm_ptr,
                angles_ptr,
                head,
                head < HEADS,
                eps,
                D,
                ROT,
                Q_NORM,
                SPLITS,
                BLOCK_HALF,
                BLOCK_REST,
                DEPENDENT,
            )
            return
        slot = tl.load(kv_slots_ptr + row).to(tl.int64)
        head = (block - Q_BLOCKS) % KV_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        head_mask = (head < KV_HEADS) & (slot >= 0)
        if block < Q_BLOCKS + KV_BLOCKS:
            _rotate_heads(
                row_ptr + HEADS * D,
                stride_qkv_split,
                key_cache_ptr + slot * stride_k_slot,
                stride_k_head,
                k_norm_ptr,
                angles_ptr,
                head,
                head_mask,
                eps,
                D,
                ROT,
                K_NORM,
                SPLITS,
                BLOCK_HALF,
                BLOCK_REST,
                DEPENDENT,
            )
        else:
            wait_for_inputs(DEPENDENT)
            launch_next(DEPENDENT)
            dims = tl.arange(0, BLOCK_D)[None, :]
            mask = head_mask[:, None] & (dims < D)
            source = row_ptr + (HEADS + KV_HEADS) * D + head[:, None] * D + dims
            v = load_sum(source, stride_qkv_split, mask, SPLITS, value_cache_ptr.dtype.element_ty)
            head_offset = head[:, None].to(tl.int64) * stride_v_head
            tl.store(value_cache_ptr + slot * stride_v_slot + head_offset + dims, v, mask=mask)


def rope_store(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
) -> Tensor:
    """Return the rotated q [T, H, d], inside qkv unless that comes as partial sums.

    The rotated k and the plain v go to the caches; k and v inside qkv stay as they are. A position
    behind the table's end takes its last row. No two rows may have the same slot. The last
    dimension of every tensor is contiguous.
    """
    if not uses_triton(qkv):
        args = (qkv, rows, rope_table, key_cache, value_cache, heads)
        if qkv.dim() == 2 and ops.rope_store(*args):
            return qkv.unflatten(1, (-1, key_cache.shape[2]))[:, : heads.num_heads]
        return reference(*args)
    d = key_cache.shape[2]
    rot = rope_table.shape[1]
    assert qkv.shape[-1] == (heads.num_heads + 2 * heads.num_kv_heads) * d
    assert rot % 2 == 0 and 2 <= rot <= d
    assert key_cache.shape == value_cache.shape and key_cache.dtype == value_cache.dtype
    assert qkv.stride(-1) == rope_table.stride(1) == 1
    assert key_cache.stride(2) == value_cache.stride(2) == 1
    query = qkv
    if qkv.dim() == 3:
        query = torch.empty(
            qkv.shape[1], heads.num_heads * d, dtype=key_cache.dtype, device=qkv.device
        )
    assert query.dtype == key_cache.dtype
    _launch(qkv, query, rows, rope_table, key_cache, value_cache, heads)
    return query[:, : heads.num_heads * d].unflatten(1, (heads.num_heads, d))


def _launch(
    qkv: Tensor,
    query: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
) -> None:
    d = key_cache.shape[2]
    rot = rope_table.shape[1]
    q_blocks = triton.cdiv(heads.num_heads, HEADS_PER_PROGRAM)
    kv_blocks = triton.cdiv(heads.num_kv_heads, HEADS_PER_PROGRAM)
    _rope_store_kernel[(qkv.shape[-2], q_blocks + 2 * kv_blocks)](
        qkv,
        query,
        rows.positions,
        rows.kv_slots,
        rope_table,
        key_cache,
        value_cache,
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        heads.eps,
        len(rope_table),
        qkv.stride(0),
        qkv.stride(-2),
        query.stride(0),
        rope_table.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        D=d,
        ROT=rot,
        Q_NORM=heads.q_norm is not None,
        K_NORM=heads.k_norm is not None,
        SPLITS=1 if qkv.dim() == 2 else len(qkv),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        BLOCK_HALF=triton.next_power_of_2(rot // 2),
        BLOCK_REST=triton.next_power_of_2(max(d - rot, 1)),
        BLOCK_D=triton.next_power_of_2(d),
        num_warps=1,
        **launch_options(qkv),
    )

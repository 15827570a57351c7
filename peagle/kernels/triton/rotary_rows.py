"""Rows of a qkv product that are rotated while they are loaded, inside attention.

A program of rotated attention (rotated_attention.py) loads its queries, and the keys and values of
the new rows, from the product instead of the cache. Dimension i of a head rotates with dimension
(i + rot/2) % rot, which a second load brings to the same place of the tile:

    d=4, rot=4      dims     0        1        2        3
                    pairs    2        3        0        1
                    sines   -sin 0   -sin 1    sin 0    sin 1

Results are rounded where rope_store rounds, so without head norms they have the same bits.
"""

from typing import Any, NamedTuple

from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads
from peagle.kernels.row_pass import RowPass

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None


class Rotation(NamedTuple):
    """What an attention kernel needs to rotate the rows of a qkv product."""

    qkv: Tensor  # [T, (H + 2 Hkv) d], or partial sums [S, T, (H + 2 Hkv) d]
    rope_table: Tensor
    heads: AttentionHeads

    @property
    def query(self) -> Tensor:
        """The queries [T, H, d] in the product, or in its first partial sum."""
        qkv = self.qkv if self.qkv.dim() == 2 else self.qkv[0]
        num_heads, kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        return qkv.unflatten(1, (num_heads + 2 * kv_heads, -1))[:, :num_heads]


class QkvRows(NamedTuple):
    """The rows of one request in a qkv product; in a kernel."""

    qkv_ptr: Any
    stride_split: Any
    stride_row: Any
    positions_ptr: Any
    rope_table_ptr: Any
    stride_rope_row: Any
    max_positions: Any
    first_row: Any
    first: Any  # position of the first row
    eps: Any


class QkvSizes(NamedTuple):
    """Constants of the kernel."""

    HEADS: Any
    KV_HEADS: Any
    D: Any
    ROT: Any
    SUMS: Any  # split-K partial sums of the product
    K_NORM: Any
    PAGE_SIZE: Any
    BLOCK_D: Any


class HeadCache(NamedTuple):
    """The keys and values of one head, and the pages of one request; in a kernel."""

    keys_ptr: Any  # [1, d]
    values_ptr: Any  # [1, d]
    stride_k_slot: Any
    stride_v_slot: Any
    table_ptr: Any


class NewKeys(NamedTuple):
    """The keys and values of new rows, of one head; in a kernel."""

    kv_head: Any
    norms: Any  # see `load_norm`
    kv_slots_ptr: Any
    is_stored: Any  # Whether this program stores them.


def rotation_arguments(rotation: Rotation | None, rows: RowPass) -> dict[str, Any]:
    """The arguments of an attention kernel that rotates; without a rotation, it uses none of them.

    The kernel's query is `rotation.query`.
    """
    if rotation is None:
        pointers = ("kv_slots_ptr", "rope_table_ptr", "q_norm_ptr", "k_norm_ptr")
        numbers = ("eps", "max_positions", "stride_q_split", "stride_rope_row")
        constants = {"ROT": 0, "SUMS": 1, "Q_NORM": False, "K_NORM": False}
        return {"ROTATE": False, **constants, **dict.fromkeys((*pointers, *numbers))}
    qkv, rope_table, heads = rotation
    return {
        "ROTATE": True,
        "ROT": rope_table.shape[1],
        "SUMS": 1 if qkv.dim() == 2 else len(qkv),
        "Q_NORM": heads.q_norm is not None,
        "K_NORM": heads.k_norm is not None,
        "kv_slots_ptr": rows.kv_slots,
        "rope_table_ptr": rope_table,
        "q_norm_ptr": heads.q_norm,
        "k_norm_ptr": heads.k_norm,
        "eps": heads.eps,
        "max_positions": len(rope_table),
        "stride_q_split": qkv.stride(0),
        "stride_rope_row": rope_table.stride(0),
    }


if triton is not None:

    @triton.jit
    def load_sum(  # type: ignore[no-untyped-def]
        ptr, stride_split, mask, SUMS: tl.constexpr, dtype
    ):
        """Load and add the partial sums of one tile."""
        x = tl.load(ptr, mask=mask, other=0.0)
        for i in tl.static_range(1, SUMS):
            x += tl.load(ptr + i * stride_split, mask=mask, other=0.0)
        return x.to(dtype)

    @triton.jit
    def scale_by_norm(x, scale, weight, dtype):  # type: ignore[no-untyped-def]
        return (weight.to(tl.float32)[None, :] * (x * scale).to(dtype).to(tl.float32)).to(dtype)

    @triton.jit
    def _pair_dims(sizes):  # type: ignore[no-untyped-def]
        return (tl.arange(0, sizes.BLOCK_D) + sizes.ROT // 2) % sizes.ROT

    @triton.jit
    def load_angles(qkv_rows, row, mask, sizes, dtype):  # type: ignore[no-untyped-def]
        """[N, d]: the cosines of rows, and the sines with the signs that their dimensions have."""
        dims = tl.arange(0, sizes.BLOCK_D)
        position = tl.load(qkv_rows.positions_ptr + row, mask=mask, other=0).to(tl.int64)
        position = tl.minimum(position, qkv_rows.max_positions - 1)
        table_row = qkv_rows.rope_table_ptr + position[:, None] * qkv_rows.stride_rope_row
        ptr = table_row + (dims % (sizes.ROT // 2))[None, :]
        angle_mask = mask[:, None] & (dims < sizes.ROT)[None, :]
        cos = tl.load(ptr, mask=angle_mask, other=0.0)
        sin = tl.load(ptr + sizes.ROT // 2, mask=angle_mask, other=0.0)
        sin = tl.where((dims < sizes.ROT // 2)[None, :], -sin, sin)
        return cos.to(dtype), sin.to(dtype)

    @triton.jit
    def load_norm(norm_ptr, sizes, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
        """[d] each: the weights of a head norm, and those of the pairs; without a norm, zeros."""
        dims = tl.arange(0, sizes.BLOCK_D)
        weight = tl.zeros([sizes.BLOCK_D], tl.float32)
        pair_weight = weight
        if NORM:
            weight = tl.load(norm_ptr + dims, mask=dims < sizes.D, other=0.0).to(tl.float32)
            pairs_ptr = norm_ptr + _pair_dims(sizes)
            pair_weight = tl.load(pairs_ptr, mask=dims < sizes.ROT, other=0.0).to(tl.float32)
        return weight, pair_weight

    @triton.jit
    def load_rotated(  # type: ignore[no-untyped-def]
        qkv_rows, row, head, mask, cos, sin, norms, sizes, NORM: tl.constexpr
    ):
        """[N, d]: heads of rows, normed and rotated; `head` counts from the first query head on."""
        dtype = cos.dtype
        dims = tl.arange(0, sizes.BLOCK_D)
        source = qkv_rows.qkv_ptr + row.to(tl.int64)[:, None] * qkv_rows.stride_row
        source += head.to(tl.int64)[:, None] * sizes.D
        head_mask = mask[:, None] & (dims < sizes.D)[None, :]
        pair_mask = mask[:, None] & (dims < sizes.ROT)[None, :]
        pairs = source + _pair_dims(sizes)[None, :]
        x = load_sum(source + dims[None, :], qkv_rows.stride_split, head_mask, sizes.SUMS, dtype)
        pair = load_sum(pairs, qkv_rows.stride_split, pair_mask, sizes.SUMS, dtype)
        if NORM:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / sizes.D + qkv_rows.eps)[:, None]
            x = scale_by_norm(wide, scale, norms[0], dtype)
            pair = scale_by_norm(pair.to(tl.float32), scale, norms[1], dtype)
        # Products are rounded, then the sum.
        plain = (x.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
        turned = (pair.to(tl.float32) * sin.to(tl.float32)).to(dtype).to(tl.float32)
        rotated = (plain + turned).to(dtype)
        if sizes.ROT < sizes.D:
            rotated = tl.where((dims < sizes.ROT)[None, :], rotated, x)
        return rotated

    @triton.jit
    def _load_new_keys(  # type: ignore[no-untyped-def]
        qkv_rows, cache, new_keys, row, is_new, sizes
    ):
        """[keys, d] each: keys and values of new rows. This program may have to store them."""
        dtype = cache.keys_ptr.dtype.element_ty
        dims = tl.arange(0, sizes.BLOCK_D)
        cos, sin = load_angles(qkv_rows, row, is_new, sizes, dtype)
        slot_mask = is_new & new_keys.is_stored
        slot = tl.load(new_keys.kv_slots_ptr + row, mask=slot_mask, other=-1)
        slot = slot.to(tl.int64)[:, None]
        head = tl.zeros_like(row) + sizes.HEADS + new_keys.kv_head
        k = load_rotated(qkv_rows, row, head, is_new, cos, sin, new_keys.norms, sizes, sizes.K_NORM)
        source = qkv_rows.qkv_ptr + row[:, None] * qkv_rows.stride_row
        source += (head + sizes.KV_HEADS)[:, None] * sizes.D + dims[None, :]
        mask = is_new[:, None] & (dims < sizes.D)[None, :]
        v = load_sum(source, qkv_rows.stride_split, mask, sizes.SUMS, dtype)
        mask = mask & (slot >= 0)
        tl.store(cache.keys_ptr + slot * cache.stride_k_slot, k, mask=mask)
        tl.store(cache.values_ptr + slot * cache.stride_v_slot, v, mask=mask)
        return k, v

    @triton.jit
    def load_last_keys(  # type: ignore[no-untyped-def]
        qkv_rows, cache, new_keys, key_position, high, sizes
    ):
        """[keys, d] each: keys and values, those before the new rows from the cache; up to `high`.

        Nothing is read that a program of this launch stores.
        """
        dims = tl.arange(0, sizes.BLOCK_D)
        row = qkv_rows.first_row + key_position - qkv_rows.first
        in_range = key_position < high
        is_cached = in_range & (key_position < qkv_rows.first)
        is_new = in_range & (key_position >= qkv_rows.first)
        new_k, new_v = _load_new_keys(qkv_rows, cache, new_keys, row, is_new, sizes)
        page_ptr = cache.table_ptr + key_position // sizes.PAGE_SIZE
        page = tl.load(page_ptr, mask=is_cached, other=0).to(tl.int64)
        slot = (page * sizes.PAGE_SIZE + key_position % sizes.PAGE_SIZE)[:, None]
        mask = is_cached[:, None] & (dims < sizes.D)[None, :]
        k_ptr = cache.keys_ptr + slot * cache.stride_k_slot
        v_ptr = cache.values_ptr + slot * cache.stride_v_slot
        k = tl.where(is_cached[:, None], tl.load(k_ptr, mask=mask, other=0.0), new_k)
        v = tl.where(is_cached[:, None], tl.load(v_ptr, mask=mask, other=0.0), new_v)
        return k, v

"""Rows of a qkv product that are rotated while they are loaded, inside attention.

A program of rotated attention (rotated_attention.py) loads its queries from the product, and keys
and values of new rows, which it stores. Dimension i of a head rotates with dimension
(i + rot/2) % rot, which a second load brings to the same place of the tile:

    d=4, rot=4      dims     0        1        2        3
                    pairs    2        3        0        1
                    sines   -sin 0   -sin 1    sin 0    sin 1

Results are rounded where rope_store rounds, so they have the same bits. Angles and KV slots are
older than the kernel in front: they are loaded before `wait_for_inputs`.
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

NEW_ROW_BLOCKS = (1, 8, 16)  # Each is a kernel of its own.
TREE_ROW_BLOCKS = (16, 32)


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


class QkvProduct(NamedTuple):
    """The product, or its partial sums; in a kernel."""

    qkv_ptr: Any
    stride_split: Any
    stride_row: Any


class RopeTable(NamedTuple):
    """The positions of rows, and the table that has their cosines and sines; in a kernel."""

    positions_ptr: Any
    table_ptr: Any
    stride_row: Any
    max_positions: Any


class NewRows(NamedTuple):
    """The rows of a request whose keys a program reads; in a kernel."""

    start: Any  # the first one
    first: Any  # its position
    end: Any  # their number
    split: Any  # of the keys, which the program reads
    kv_head: Any


class NewBlock(NamedTuple):
    """Some of these rows, and what is known of them before the product is; in a kernel."""

    row: Any
    is_read: Any  # by this program
    slot: Any
    angles: Any


class HeadCache(NamedTuple):
    """The keys and values of one head; in a kernel."""

    keys_ptr: Any  # [1, d]
    values_ptr: Any  # [1, d]
    stride_k_slot: Any
    stride_v_slot: Any
    kv_slots_ptr: Any


class QkvSizes(NamedTuple):
    """Constants of the kernel."""

    HEADS: Any
    GROUP: Any
    D: Any
    ROT: Any
    SUMS: Any  # split-K partial sums of the product
    SPLITS: Any  # of the keys, of which a program reads one
    TREE: Any  # The place of a key among the splits is its position, not that of its KV slot.
    BLOCK_KEYS: Any
    BLOCK_NEW: Any  # new rows that are rotated at once
    BLOCK_D: Any


def rotation_arguments(rotation: Rotation | None, rows: RowPass) -> dict[str, Any]:
    """The arguments of an attention kernel that rotates; without a rotation, it uses none of them.

    The kernel's query is `rotation.query`.
    """
    if rotation is None:
        pointers = ("kv_slots_ptr", "rope_table_ptr")
        numbers = ("max_positions", "stride_q_split", "stride_rope_row")
        constants = dict.fromkeys(("ROT", "SUMS", "BLOCK_NEW", "MORE_ROWS"), 0)
        return {"ROTATE": False, **constants, **dict.fromkeys((*pointers, *numbers))}
    qkv, rope_table, _ = rotation
    blocks = NEW_ROW_BLOCKS if rows.tree_masks is None else TREE_ROW_BLOCKS
    return {
        "ROTATE": True,
        "ROT": rope_table.shape[1],
        "SUMS": 1 if qkv.dim() == 2 else len(qkv),
        "BLOCK_NEW": next((n for n in blocks if n >= rows.max_rows), blocks[-1]),
        "MORE_ROWS": rows.max_rows > blocks[-1],
        "kv_slots_ptr": rows.kv_slots,
        "rope_table_ptr": rope_table,
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
    def rounded_product(x, y, dtype):  # type: ignore[no-untyped-def]
        """x * y, rounded to dtype, in float32.

        A compiler computes plain products of bf16 in bf16, and fuses one of two with their sum.
        """
        return tl.fma(x.to(tl.float32), y.to(tl.float32), 0.0).to(dtype).to(tl.float32)

    @triton.jit
    def _pair_dims(sizes):  # type: ignore[no-untyped-def]
        return (tl.arange(0, sizes.BLOCK_D) + sizes.ROT // 2) % sizes.ROT

    @triton.jit
    def load_positions(rope, row, mask):  # type: ignore[no-untyped-def]
        return tl.load(rope.positions_ptr + row, mask=mask, other=0)

    @triton.jit
    def load_angles(rope, position, mask, sizes, dtype):  # type: ignore[no-untyped-def]
        """[N, d]: cosines of positions, and sines with the signs that their dimensions have."""
        dims = tl.arange(0, sizes.BLOCK_D)
        position = tl.minimum(position.to(tl.int64), rope.max_positions - 1)
        row_ptr = rope.table_ptr + position[:, None] * rope.stride_row
        ptr = row_ptr + (dims % (sizes.ROT // 2))[None, :]
        angle_mask = mask[:, None] & (dims < sizes.ROT)[None, :]
        cos = tl.load(ptr, mask=angle_mask, other=0.0)
        sin = tl.load(ptr + sizes.ROT // 2, mask=angle_mask, other=0.0)
        sin = tl.where((dims < sizes.ROT // 2)[None, :], -sin, sin)
        return cos.to(dtype), sin.to(dtype)

    @triton.jit
    def load_rotated(product, row, head, mask, angles, sizes):  # type: ignore[no-untyped-def]
        """[N, d]: rotated heads of rows; keys are the heads behind the queries."""
        cos, sin = angles
        dtype = cos.dtype
        dims = tl.arange(0, sizes.BLOCK_D)
        source = product.qkv_ptr + row[:, None] * product.stride_row + head[:, None] * sizes.D
        head_mask = mask[:, None] & (dims < sizes.D)[None, :]
        pair_mask = mask[:, None] & (dims < sizes.ROT)[None, :]
        pairs = source + _pair_dims(sizes)[None, :]
        x = load_sum(source + dims[None, :], product.stride_split, head_mask, sizes.SUMS, dtype)
        pair = load_sum(pairs, product.stride_split, pair_mask, sizes.SUMS, dtype)
        # Products are rounded, then the sum.
        turned = rounded_product(pair, sin, dtype)
        rotated = (rounded_product(x, cos, dtype) + turned).to(dtype)
        if sizes.ROT < sizes.D:
            rotated = tl.where((dims < sizes.ROT)[None, :], rotated, x)
        return rotated

    @triton.jit
    def load_new_block(rope, rows, cache, start, sizes, dtype):  # type: ignore[no-untyped-def]
        """The rows from `start` on."""
        local_row = start + tl.arange(0, sizes.BLOCK_NEW)
        row = rows.start + local_row
        is_row = local_row < rows.end
        position = load_positions(rope, row, is_row)
        place = rows.first + local_row
        if sizes.TREE:
            place = position
        is_read = is_row & (place // sizes.BLOCK_KEYS % sizes.SPLITS == rows.split)
        slot = tl.load(cache.kv_slots_ptr + row, mask=is_read, other=-1).to(tl.int64)
        angles = load_angles(rope, position, is_read, sizes, dtype)
        return NewBlock(row, is_read, slot, angles)

    @triton.jit
    def _store_block(product, rows, block, cache, sizes):  # type: ignore[no-untyped-def]
        dims = tl.arange(0, sizes.BLOCK_D)
        row = block.row
        key_head = tl.zeros_like(row) + sizes.HEADS + rows.kv_head
        k = load_rotated(product, row, key_head, block.is_read, block.angles, sizes)
        value_head = key_head + sizes.HEADS // sizes.GROUP
        source = product.qkv_ptr + row[:, None] * product.stride_row + value_head[:, None] * sizes.D
        mask = block.is_read[:, None] & (dims < sizes.D)[None, :]
        v = load_sum(source + dims[None, :], product.stride_split, mask, sizes.SUMS, k.dtype)
        slot = block.slot[:, None]
        mask = mask & (slot >= 0)
        tl.store(cache.keys_ptr + slot * cache.stride_k_slot, k, mask=mask)
        tl.store(cache.values_ptr + slot * cache.stride_v_slot, v, mask=mask)

    @triton.jit
    def store_new_keys(  # type: ignore[no-untyped-def]
        product, rows, rope, block, cache, sizes, MORE_ROWS: tl.constexpr
    ):
        """Store the keys and values of new rows that this program reads behind a barrier.

        `block`: the first BLOCK_NEW rows.
        """
        _store_block(product, rows, block, cache, sizes)
        if MORE_ROWS:
            dtype = block.angles[0].dtype
            for start in tl.range(sizes.BLOCK_NEW, rows.end, sizes.BLOCK_NEW, num_stages=1):
                next_block = load_new_block(rope, rows, cache, start, sizes, dtype)
                _store_block(product, rows, next_block, cache, sizes)

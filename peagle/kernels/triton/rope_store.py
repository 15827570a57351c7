"""Rotary embedding in place, and the new keys and values into their slots: one launch behind the qkv projection.

Rotate-half convention: dimension i turns with dimension i + rot/2; dimensions from rot on do not turn (partial rotary).
Where a head norm is given (Qwen3), each head is RMS-normed before it turns. Everything is rounded where transformers
rounds: cos and sin to the tensors' dtype, each product, the sum.

One program a (row, a few heads). Query heads and key/value heads are different programs; a thread stores the two
elements it has loaded, so that nobody reads what another has already turned.

Shapes: qkv [T, (H + 2 Hkv) d] with the heads of q, k, v in this order, positions and slots [T] (slot -1: nothing is
stored), table [max_pos, rot] float32 (cos of rot/2 frequencies, then sin), caches [num_slots, Hkv, d], norms [d].
qkv may come in shares [S, T, (H + 2 Hkv) d] (few_rows.py): they are added up first, and q gets a tensor of its own.
"""

from typing import Any

import torch
from torch import Tensor

from peagle.kernels.cpu import ops

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

HEADS = 4  # of a program


def reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """What the kernel computes, in plain PyTorch."""
    qkv = qkv if qkv.dim() == 2 else qkv.sum(0).to(key_cache.dtype)
    turn(
        qkv,
        angles(positions, table, qkv.dtype),
        slots,
        key_cache,
        value_cache,
        heads,
        kv_heads,
        q_norm,
        k_norm,
        eps,
    )
    return qkv.unflatten(1, (-1, key_cache.shape[2]))[:, :heads]


def angles(positions: Tensor, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each row, [T, 1, rot / 2]: the same for every layer of a pass."""
    cos, sin = table[positions.long().clamp(max=len(table) - 1)].to(dtype)[:, None].chunk(2, -1)
    return cos, sin


def turn(
    qkv: Tensor,
    angle: tuple[Tensor, Tensor],
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """The reference, with its angles looked up."""
    (cos, sin), d = angle, key_cache.shape[2]
    half = cos.shape[-1]
    q, k, v = qkv.unflatten(1, (-1, d)).split(
        [heads, kv_heads, kv_heads], 1
    )  # views: [T, heads, d]

    def normed(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return x
        wide = x.float()
        return norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    plain = q_norm is None and k_norm is None
    both = (
        qkv.unflatten(1, (-1, d))[:, : heads + kv_heads]
        if plain
        else torch.cat([normed(q, q_norm), normed(k, k_norm)], 1)
    )
    left, right, rest = both.split([half, half, d - 2 * half], -1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1).to(qkv.dtype)
    new_q, new_k = turned.split([heads, kv_heads], 1)
    stored = slots >= 0
    if not bool(stored.all()):
        slots, new_k, v = slots[stored], new_k[stored], v[stored]
    key_cache[slots.long()] = new_k
    value_cache[slots.long()] = v
    q.copy_(new_q)


if triton is not None:

    @triton.jit
    def _read(at, share, mask, SHARES: tl.constexpr, dtype):  # type: ignore[no-untyped-def]
        x = tl.load(at, mask=mask, other=0.0)
        for i in tl.static_range(1, SHARES):
            x += tl.load(at + i * share, mask=mask, other=0.0)
        return x.to(dtype)

    @triton.jit
    def _turn(  # type: ignore[no-untyped-def]
        source,
        share,
        target,
        target_head,
        norm,
        angles,
        head,
        there,
        eps,
        D: tl.constexpr,
        ROT: tl.constexpr,
        NORM: tl.constexpr,
        SHARES: tl.constexpr,
        BLOCK_HALF: tl.constexpr,
        BLOCK_REST: tl.constexpr,
    ):
        """Heads [HEADS] of one row, from source (heads side by side) to target (heads target_head apart)."""
        HALF: tl.constexpr = ROT // 2
        dims, rest = tl.arange(0, BLOCK_HALF), ROT + tl.arange(0, BLOCK_REST)
        inside, outside = (dims < HALF)[None, :], (rest < D)[None, :]
        at, to = source + head[:, None] * D, target + head[:, None].to(tl.int64) * target_head
        dtype = target.dtype.element_ty
        left = _read(at + dims[None, :], share, there[:, None] & inside, SHARES, dtype)
        right = _read(at + HALF + dims[None, :], share, there[:, None] & inside, SHARES, dtype)
        still = _read(at + rest[None, :], share, there[:, None] & outside, SHARES, dtype)
        if NORM:
            x, y, z = left.to(tl.float32), right.to(tl.float32), still.to(tl.float32)
            square = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
            scale = tl.rsqrt(square / D + eps)[:, None]
            gain_x = tl.load(norm + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
            gain_y = tl.load(norm + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[
                None, :
            ]
            gain_z = tl.load(norm + rest, mask=rest < D, other=0.0).to(tl.float32)[None, :]
            left = (gain_x * (x * scale).to(dtype).to(tl.float32)).to(dtype)
            right = (gain_y * (y * scale).to(dtype).to(tl.float32)).to(dtype)
            still = (gain_z * (z * scale).to(dtype).to(tl.float32)).to(dtype)
        cos = tl.load(angles + dims, mask=dims < HALF, other=0.0).to(dtype).to(tl.float32)[None, :]
        sin = (
            tl.load(angles + HALF + dims, mask=dims < HALF, other=0.0)
            .to(dtype)
            .to(tl.float32)[None, :]
        )
        x, y = left.to(tl.float32), right.to(tl.float32)
        new_left = (x * cos).to(dtype).to(tl.float32) - (y * sin).to(dtype).to(tl.float32)
        new_right = (y * cos).to(dtype).to(tl.float32) + (x * sin).to(dtype).to(tl.float32)
        tl.store(to + dims[None, :], new_left.to(dtype), mask=there[:, None] & inside)
        tl.store(to + HALF + dims[None, :], new_right.to(dtype), mask=there[:, None] & inside)
        tl.store(to + rest[None, :], still, mask=there[:, None] & outside)

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        qkv,
        query,
        positions,
        slots,
        table,
        key_cache,
        value_cache,
        q_norm,
        k_norm,
        eps,
        max_pos,
        qkv_share,
        qkv_row,
        query_row,
        table_row,
        key_slot,
        key_head,
        value_slot,
        value_head,
        H: tl.constexpr,
        KV: tl.constexpr,
        D: tl.constexpr,
        ROT: tl.constexpr,
        Q_NORM: tl.constexpr,
        K_NORM: tl.constexpr,
        SHARES: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_HALF: tl.constexpr,
        BLOCK_REST: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        Q_BLOCKS: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
        position = tl.minimum(tl.load(positions + row).to(tl.int64), max_pos - 1)
        angles, mine = table + position * table_row, qkv + row * qkv_row
        if block < Q_BLOCKS:
            head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            _turn(
                mine,
                qkv_share,
                query + row * query_row,
                D,
                q_norm,
                angles,
                head,
                head < H,
                eps,
                D,
                ROT,
                Q_NORM,
                SHARES,
                BLOCK_HALF,
                BLOCK_REST,
            )
        else:
            slot = tl.load(slots + row).to(tl.int64)
            head = (block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            there = (head < KV) & (slot >= 0)
            keys = key_cache + slot * key_slot
            _turn(
                mine + H * D,
                qkv_share,
                keys,
                key_head,
                k_norm,
                angles,
                head,
                there,
                eps,
                D,
                ROT,
                K_NORM,
                SHARES,
                BLOCK_HALF,
                BLOCK_REST,
            )
            dims = tl.arange(0, BLOCK_D)[None, :]
            at = mine + (H + KV) * D + head[:, None] * D + dims
            v = _read(
                at, qkv_share, there[:, None] & (dims < D), SHARES, value_cache.dtype.element_ty
            )
            to = value_cache + slot * value_slot + head[:, None].to(tl.int64) * value_head + dims
            tl.store(to, v, mask=there[:, None] & (dims < D))


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The turned q [T, H, d], inside qkv where that is whole; turned k and plain v go to the caches; k and v inside qkv
    stay as they are.

    A position behind the table's end takes its last row. No two rows may have the same slot. The last dimension of
    every tensor must be contiguous.
    """
    if triton is None or not (qkv.is_cuda or triton.knobs.runtime.interpret):
        args = (
            qkv,
            positions,
            slots,
            table,
            key_cache,
            value_cache,
            heads,
            kv_heads,
            q_norm,
            k_norm,
            eps,
        )
        if qkv.dim() == 2 and ops.rope_store(*args):
            return qkv.unflatten(1, (-1, key_cache.shape[2]))[:, :heads]
        return reference(*args)
    d, rot, rows = key_cache.shape[2], table.shape[1], qkv.shape[-2]
    assert qkv.shape[-1] == (heads + 2 * kv_heads) * d and key_cache.shape == value_cache.shape
    assert rot % 2 == 0 and 2 <= rot <= d and key_cache.dtype == value_cache.dtype
    assert qkv.stride(-1) == table.stride(1) == key_cache.stride(2) == value_cache.stride(2) == 1
    whole = qkv.dim() == 2
    query = qkv if whole else torch.empty(rows, heads * d, dtype=key_cache.dtype, device=qkv.device)
    assert query.dtype == key_cache.dtype
    sizes: dict[str, Any] = {
        "H": heads,
        "KV": kv_heads,
        "D": d,
        "ROT": rot,
        "Q_NORM": q_norm is not None,
        "K_NORM": k_norm is not None,
        "SHARES": 1 if whole else len(qkv),
        "BLOCK_HEADS": HEADS,
        "BLOCK_HALF": triton.next_power_of_2(rot // 2),
        "BLOCK_REST": triton.next_power_of_2(max(d - rot, 1)),
        "BLOCK_D": triton.next_power_of_2(d),
    }
    strides = (
        qkv.stride(0),
        qkv.stride(-2),
        query.stride(0),
        table.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
    )
    norms = (qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm)
    grid = (rows, triton.cdiv(heads, HEADS) + triton.cdiv(kv_heads, HEADS))
    _kernel[grid](
        qkv,
        query,
        positions,
        slots,
        table,
        key_cache,
        value_cache,
        *norms,
        eps,
        len(table),
        *strides,
        **sizes,
        num_warps=1,
    )
    return query[:, : heads * d].unflatten(1, (heads, d))

"""Attention of one new token per slot over that slot's own keys: the decode step of a batch.

Slots are of different lengths in one tensor of fixed capacity. A masked attention reads every slot up to the capacity;
the kernel reads only the keys that are there. One program a (slot, key/value head): the query heads of a group are the
rows of its matrices, padded to the 16 the tensor cores want, and the softmax is computed online in float32.

Shapes: query [slots, heads, d], key and value [slots, kv_heads, capacity, d], lengths [slots]; the token of slot s lies
at position lengths[s] and sees the keys 0 .. lengths[s]. Result [slots, heads, d].
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the masked attention
    triton = None

KEYS = 64  # a block of keys
ROWS = 16  # the smallest side of a tensor core's matrix
LOG2_E = 1.4426950408889634


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """What the kernel computes, in plain PyTorch and float32."""
    group = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(group, 1)  # [slots, heads, capacity, d]
    values = value.float().repeat_interleave(group, 1)
    scores = torch.einsum("shd,shcd->shc", query.float(), keys) * scale
    unseen = torch.arange(key.shape[2], device=key.device) > lengths[:, None]  # [slots, capacity]
    weights = scores.masked_fill(unseen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("shc,shcd->shd", weights, values).to(query.dtype)


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        query,
        key,
        value,
        lengths,
        out,
        scale,
        query_slot,
        query_head,
        key_slot,
        key_head,
        key_row,
        value_slot,
        value_head,
        value_row,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        rows, cols, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_D)
        mine = (rows[:, None] < GROUP) & (dims[None, :] < D)
        heads = head * GROUP + rows[:, None]
        q = tl.load(
            query + slot * query_slot + heads * query_head + dims[None, :], mask=mine, other=0.0
        )
        end = tl.load(lengths + slot).to(tl.int32) + 1
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)  # the largest score so far
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        for start in range(0, end, BLOCK_KEYS):
            at = start + cols
            there = (at[:, None] < end) & (dims[None, :] < D)
            key_at = slot * key_slot + head * key_head + at[:, None] * key_row + dims[None, :]
            k = tl.load(key + key_at, mask=there, other=0.0)  # [keys, d]
            scores = (
                tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            )  # [rows, keys], in powers of 2
            scores = tl.where(at[None, :] < end, scores, float("-inf"))
            larger = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - larger[:, None])
            shrink = tl.exp2(best - larger)
            value_at = (
                slot * value_slot + head * value_head + at[:, None] * value_row + dims[None, :]
            )
            v = tl.load(value + value_at, mask=there, other=0.0)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            best = larger
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (slot * KV_HEADS * GROUP + heads) * D + dims[None, :], result, mask=mine)


def available() -> bool:
    return triton is not None


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """The kernel. The last dimension of query, key and value must be contiguous; nothing else need be."""
    assert triton is not None and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    slots, heads, d = query.shape
    kv_heads = key.shape[1]
    out = torch.empty(slots, heads, d, dtype=query.dtype, device=query.device)
    sizes: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "D": d,
        "BLOCK_ROWS": max(ROWS, triton.next_power_of_2(heads // kv_heads)),
        "BLOCK_KEYS": KEYS,
        "BLOCK_D": max(ROWS, triton.next_power_of_2(d)),
    }
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3])
    _kernel[(slots, kv_heads)](query, key, value, lengths, out, scale * LOG2_E, *strides, **sizes)
    return out

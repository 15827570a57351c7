"""Attention of a ragged batch over keys and values in pages: verification, drafting and prefill alike.

Request b owns the rows query[starts[b] : starts[b] + counts[b]]. Its row i lies at position p = first[b] + i and sees
the positions max(0, p - window + 1) .. p of its own request; position j lies in the slot

    tables[b, j // page_size] * page_size + j % page_size

The rows of a tree (peagle/tree.py) lie in the slots of first[b] + i all the same, but at the position of their depth:
row i sees every position before first[b] (of the window, where there is one) and the rows that masks has bits for. The
last `both` rows of each request may see each other, later ones too (the mask rows of a bidirectional drafter).

One program a (request, key/value head, block of rows). The rows of a block are (query row, head of the group), so that
a group shares what is loaded; a block has at least the 16 rows the tensor cores want. Softmax online in float32.

Where there are few requests, `splits` programs share the keys of a block, page of keys by page of keys in turns; each
leaves its unnormalized sum, its largest score and its total, and the last to finish joins them. So the order in which a
row is summed depends on its position, not on its neighbors.

Shapes: query [T, heads, d], key_cache and value_cache [num_slots, kv_heads, d], tables [B, P], starts, counts and
first [B], sinks [heads], masks and positions [T]. Result [T, heads, d].
"""

from typing import Any

import torch
from torch import Tensor

from peagle.kernels.cpu import ops
from peagle.kernels.cpu.ops import EVERYTHING

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

ROWS, MOST_ROWS, MOST_WIDE = (
    16,
    64,
    32,
)  # of a block: at least, at most, at most in float32 (no tensor cores)
KEY_BYTES = 16384  # a block of keys: 64 of 128 dimensions in bf16
LOG2_E = 1.4426950408889634
UNSEEN = -1e30  # finite: a block without a seen key leaves a row without a NaN
KEYS, WARPS, STAGES = 64, 8, 2  # of a short block
PROGRAMS, MOST_SPLITS = 132, 8  # that keep a GPU busy; of a block's keys
COUNTERS = 4096  # blocks that are split


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    page_size: int,
    starts: Tensor,
    counts: Tensor,
    first: Tensor,
    most: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    masks: Tensor | None = None,
    positions: Tensor | None = None,
    both: int = 0,
) -> Tensor:
    """What the kernel computes, in plain PyTorch and float32."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    kv_heads, capacity = key_cache.shape[1], tables.shape[1] * page_size
    requests = zip(tables.long(), starts.tolist(), counts.tolist(), first.tolist(), strict=True)
    for table, start, count, position in requests:
        if count == 0:
            continue
        at = torch.arange(min(position + count, capacity), device=query.device)  # [keys]
        slots = table[at // page_size] * page_size + at % page_size
        k, v = key_cache[slots].float(), value_cache[slots].float()  # [keys, kv_heads, d]
        q = (
            query[start : start + count].float().unflatten(1, (kv_heads, -1))
        )  # [rows, kv_heads, group, d]
        scores = torch.einsum("rhgd,khd->rhgk", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        mine = slice(start, start + count)
        own = None if masks is None or positions is None else (masks[mine], positions[mine])
        seen = seen_keys(
            position, count, at, EVERYTHING if window is None else window, own, both
        )  # [rows, keys]
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat(
                [scores, sinks.float().view(kv_heads, -1, 1).expand(count, -1, -1, 1)], -1
            )
        weights = scores.softmax(-1)[..., : len(at)].nan_to_num()
        out[start : start + count] = (
            torch.einsum("rhgk,khd->rhgd", weights, v).flatten(1, 2).to(query.dtype)
        )
    return out


def seen_keys(
    first: int, count: int, at: Tensor, window: int, tree: tuple[Tensor, Tensor] | None, both: int
) -> Tensor:
    """[rows, keys]: which of the keys at positions `at` each row of a request sees. `tree`: its masks and positions."""
    if tree is not None:
        masks, positions = tree
        bits = masks[:, None] >> (at - first).clamp(min=0) & 1
        return torch.where(at < first, at > positions[:, None] - window, bits == 1)
    p = (first + torch.arange(count, device=at.device))[:, None]
    last = torch.where(p >= first + count - both, first + count - 1, p)
    return (at <= last) & (at > p - window)


if triton is not None:
    _LOG2_E, _UNSEEN = tl.constexpr(LOG2_E), tl.constexpr(UNSEEN)

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        query,
        key_cache,
        value_cache,
        tables,
        starts,
        counts,
        first,
        sinks,
        masks,
        positions,
        out,
        parts,
        tops,
        totals,
        arrived,
        scale,
        cap,
        window,
        pages,
        query_row,
        query_head,
        key_slot,
        key_head,
        value_slot,
        value_head,
        table_row,
        out_row,
        out_head,
        HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        PAGE: tl.constexpr,
        SPLITS: tl.constexpr,
        CAPPED: tl.constexpr,
        SINKS: tl.constexpr,
        TREE: tl.constexpr,
        BOTH: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        request, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        block, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
        count = tl.load(counts + request).to(tl.int32)
        if block * BLOCK_ROWS >= count * GROUP:
            return
        flat, dims = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
        local, head = flat // GROUP, kv_head * GROUP + flat % GROUP
        row = tl.load(starts + request).to(tl.int64) + local
        mine = (local < count)[:, None] & (dims < D)[None, :]
        q = tl.load(
            query + row[:, None] * query_row + head[:, None] * query_head + dims,
            mask=mine,
            other=0.0,
        )

        begin = tl.load(first + request).to(tl.int32)
        position = begin + local
        last = position
        if BOTH > 0:
            last = begin + tl.where(local >= count - BOTH, count - 1, local)
        if TREE:
            position = tl.load(positions + row, mask=local < count, other=0).to(tl.int32)
            bits = tl.load(masks + row, mask=local < count, other=0)
        low = tl.maximum(
            begin + block * BLOCK_ROWS // GROUP - window + 1, 0
        )  # what the block's first row sees
        if TREE:
            low = tl.maximum(begin - window + 1, 0)
        high = begin + tl.minimum(
            (block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP + 1, count
        )  # and its last one
        if BOTH > 0:
            high = begin + count
        high = tl.minimum(high, pages * PAGE)
        low = (
            low // BLOCK_KEYS // SPLITS * SPLITS * BLOCK_KEYS
        )  # whole blocks of keys, the first one split 0's

        best = tl.full([BLOCK_ROWS], _UNSEEN, tl.float32)  # the largest score so far
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        if SINKS:  # one of the splits counts the sink
            sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
            best = tl.where(split == 0, sink, best)
            total = tl.where(split == 0, 1.0, total)
        mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        table = tables + request.to(tl.int64) * table_row
        keys, values = (
            key_cache + kv_head * key_head + dims[None, :],
            value_cache + kv_head * value_head + dims[None, :],
        )
        for start in range(low + split * BLOCK_KEYS, high, SPLITS * BLOCK_KEYS):
            at = start + tl.arange(0, BLOCK_KEYS)
            inside = at < high
            page = tl.load(table + at // PAGE, mask=inside, other=0)
            slot = (page.to(tl.int64) * PAGE + at % PAGE)[:, None]
            there = inside[:, None] & (dims < D)[None, :]
            k = tl.load(keys + slot * key_slot, mask=there, other=0.0)  # [keys, d]
            scores = (
                tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            )  # [rows, keys], in powers of 2
            if CAPPED:  # tanh(x) = 1 - 2 / (exp(2x) + 1); scale holds the 2 / cap
                scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
            seen = at[None, :] > position[:, None] - window
            if TREE:
                bit = (bits[:, None] >> tl.maximum(at - begin, 0).to(tl.int64)[None, :]) & 1
                seen = tl.where(at[None, :] < begin, seen, bit == 1)
            else:
                seen = seen & (at[None, :] <= last[:, None])
            scores = tl.where(seen & inside[None, :], scores, _UNSEEN)
            larger = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - larger[:, None])
            shrink = tl.exp2(best - larger)
            v = tl.load(values + slot * value_slot, mask=there, other=0.0)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            best = larger

        if SPLITS > 1:
            part = (row * HEADS + head) * SPLITS
            tl.store(tops + part + split, best, mask=local < count)
            tl.store(totals + part + split, total, mask=local < count)
            tl.store(parts + (part + split)[:, None] * D + dims[None, :], mixed, mask=mine)
            tl.debug_barrier()  # every thread has stored
            turn = (request * tl.num_programs(1) + tl.program_id(1)) * (
                tl.num_programs(2) // SPLITS
            ) + block
            if tl.atomic_add(arrived + turn, 1) < SPLITS - 1:
                return
            tl.store(arrived + turn, 0)  # for the next launch
            best = tl.full([BLOCK_ROWS], _UNSEEN, tl.float32)
            total = tl.zeros([BLOCK_ROWS], tl.float32)
            mixed = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            for other in tl.static_range(SPLITS):
                top = tl.load(
                    tops + part + other, mask=local < count, other=_UNSEEN, cache_modifier=".cg"
                )
                larger = tl.maximum(best, top)
                shrink, weight = tl.exp2(best - larger), tl.exp2(top - larger)
                said = tl.load(
                    totals + part + other, mask=local < count, other=0.0, cache_modifier=".cg"
                )
                theirs = tl.load(
                    parts + (part + other)[:, None] * D + dims,
                    mask=mine,
                    other=0.0,
                    cache_modifier=".cg",
                )
                total = total * shrink + said * weight
                mixed = mixed * shrink[:, None] + theirs * weight[:, None]
                best = larger
        result = (mixed / tl.maximum(total, 1e-9)[:, None]).to(out.dtype.element_ty)
        tl.store(
            out + row[:, None] * out_row + head[:, None] * out_head + dims[None, :],
            result,
            mask=mine,
        )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    page_size: int,
    starts: Tensor,
    counts: Tensor,
    first: Tensor,
    most: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
    arrived: Tensor | None = None,
    masks: Tensor | None = None,
    positions: Tensor | None = None,
    both: int = 0,
) -> Tensor:
    """`most` bounds counts, on the host. The last dimension of every tensor must be contiguous, nothing else need be.

    Caches must be finite wherever a table points: what is masked is still multiplied, by 0.
    Rows that belong to no request are zeros; with `out`, they stay what they were. A request of no rows reads nothing.
    A position behind the table's last page sees what the table holds; its result is of no use, but finite.
    `arrived`: zeros, int32, that nobody else uses at the same time; as they were afterwards. Trees have `masks` and
    `positions`.
    """
    if triton is None or not (query.is_cuda or triton.knobs.runtime.interpret):
        if softcap is None and sinks is None:
            into = (
                torch.zeros(query.shape, dtype=query.dtype, device=query.device)
                if out is None
                else out
            )
            args = (
                query,
                key_cache,
                value_cache,
                tables,
                page_size,
                starts,
                counts,
                first,
                most,
                scale,
                window,
                into,
            )
            if ops.attend(*args, masks, positions, both):
                return into
        return reference(
            query,
            key_cache,
            value_cache,
            tables,
            page_size,
            starts,
            counts,
            first,
            most,
            scale,
            window,
            softcap,
            sinks,
            out,
            masks,
            positions,
            both,
        )
    rows, heads, d = query.shape
    batch, kv_heads = len(tables), key_cache.shape[1]
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert (
        heads % kv_heads == 0 and key_cache.shape == value_cache.shape and out.shape == query.shape
    )
    assert (
        query.stride(2)
        == key_cache.stride(2)
        == value_cache.stride(2)
        == tables.stride(1)
        == out.stride(2)
        == 1
    )
    group, block_d = heads // kv_heads, max(16, triton.next_power_of_2(d))
    wide = query.element_size() == 4
    block_rows = min(
        max(ROWS, triton.next_power_of_2(most * group)), MOST_WIDE if wide else MOST_ROWS
    )
    # how keys are split decides the order of a row's sum: not by the blocks of rows that are spread below
    splits = splits or min(
        max(PROGRAMS // (batch * kv_heads * triton.cdiv(most * group, block_rows)), 1), MOST_SPLITS
    )
    if (
        batch * kv_heads * triton.cdiv(most * group, ROWS) <= PROGRAMS
    ):  # few: small blocks spread over the GPU
        block_rows = ROWS
    blocks = triton.cdiv(most * group, block_rows)
    sizes: dict[str, Any] = {
        "HEADS": heads,
        "GROUP": group,
        "D": d,
        "PAGE": page_size,
        "SPLITS": splits,
        "BLOCK_D": block_d,
        "CAPPED": softcap is not None,
        "SINKS": sinks is not None,
        "TREE": masks is not None,
        "BOTH": both,
        "BLOCK_ROWS": block_rows,
        **tiles(block_rows, block_d, query.element_size()),
    }
    parts = tops = totals = out
    arrived = counters(query.device) if arrived is None else arrived
    if splits > 1:
        parts = torch.empty(rows, heads, splits, d, dtype=torch.float32, device=query.device)
        tops, totals = (parts.new_empty(rows, heads, splits) for _ in range(2))
        assert batch * kv_heads * blocks <= len(arrived)
    steps = scale * LOG2_E if softcap is None else 2 * scale * LOG2_E / softcap
    cap = 0.0 if softcap is None else softcap * LOG2_E
    strides = (
        *query.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        tables.stride(0),
        *out.stride()[:2],
    )
    _kernel[(batch, kv_heads, blocks * splits)](
        query,
        key_cache,
        value_cache,
        tables,
        starts,
        counts,
        first,
        query if sinks is None else sinks,
        masks,
        positions,
        out,
        parts,
        tops,
        totals,
        arrived,
        steps,
        cap,
        EVERYTHING if window is None else window,
        tables.shape[1],
        *strides,
        **sizes,
    )
    return out


def tiles(block_rows: int, block_d: int, element_size: int) -> dict[str, int]:
    """Blocks of a step (short) as measured on an H200; longer ones as their registers allow."""
    short = element_size < 4 and block_rows <= 32
    wide = element_size == 4 or block_rows * block_d > 64 * 128
    return {
        "BLOCK_KEYS": KEYS if short else min(max(KEY_BYTES // (block_d * element_size), 16), 64),
        "num_warps": WARPS if short else 8 if wide else 4,
        "num_stages": STAGES if short else 3,
    }


def counters(device: torch.device) -> Tensor:
    """How many splits of a block have finished: none."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)

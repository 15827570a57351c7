"""The drafter's batch, copied and expanded from a verified one: `rows.draft_rows` with a fixed number of rows.

A block of R verified tokens takes R + K - 1 rows, of which kept + K live: its real rows, then K - 1 mask rows. The rows
behind are dead: position 0, slot -1, zeros. So the batch has one shape whatever was accepted, and a CUDA graph can hold
it. K is that of the next drafts; R - 1 drafts were verified.

    R=4, K=3, block 10 11 12 13 at positions 5..8, 2 drafts kept, newest 100, mask M:

    row        0    1    2    3    4    5
    id         11   12   100  M    M    dead
    position   5    6    7    8    9    0
    hidden     g5   g6   g7   mask mask 0
    sampled              1st  2nd  3rd

Mask rows store their keys and values too: later mask rows see them in this pass, real rows overwrite them in the next.
One program a row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.row_layout import draft_rows

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


class ExpandedRows(NamedTuple):
    embeds: Tensor  # [B * W, d], W = R + K - 1
    hidden: Tensor  # [B * W, d]
    positions: Tensor  # [B * W] int32
    slots: Tensor  # [B * W] int64; -1: the row stores nothing
    starts: Tensor  # [B] int32: b * W
    counts: Tensor  # [B] int32: kept + K
    sampled: Tensor  # [B * K] int64: the rows whose output is draft 1..K of each request


def reference(
    block: Tensor,
    kept: Tensor,
    newest: Tensor,
    first: Tensor,
    hidden: Tensor,
    embed_tokens: Tensor,
    mask_embedding: Tensor,
    mask_hidden: Tensor,
    mask_id: int,
    tables: Tensor,
    page_size: int,
    ends: Tensor,
    k: int,
) -> ExpandedRows:
    """What the kernel computes: the ragged rows of `draft_rows`, each at its place among the padded ones."""
    batch, width = block.shape
    wide = width + k - 1
    ids = torch.arange(batch + 1, device=block.device)
    rows = draft_rows(
        block.flatten(), ids * width, first.long(), width - 1 - kept.long(), newest, k, mask_id
    )
    counts = rows.starts.diff()  # [B]
    request = torch.repeat_interleave(ids[:-1], counts)
    shift = ids[:-1] * wide - rows.starts[:-1]  # from a ragged row of a request to its padded one
    to = torch.arange(len(request), device=block.device) + shift[request]
    total = batch * wide
    embeds, mixed = (x.new_zeros(total, x.shape[1]) for x in (embed_tokens, hidden))
    positions, slots = first.new_zeros(total, dtype=torch.int32), block.new_full((total,), -1)
    masked = rows.ids.eq(mask_id)[:, None]
    embeds[to] = torch.where(masked, mask_embedding.to(embeds.dtype), embed_tokens[rows.ids])
    mixed[to] = torch.where(
        rows.source[:, None] < 0, mask_hidden.to(mixed.dtype), hidden[rows.source.clamp(min=0)]
    )
    positions[to] = rows.positions.int()
    page = tables[request, (rows.positions // page_size).clamp(max=tables.shape[1] - 1)].long()
    slots[to] = torch.where(
        rows.positions < ends[request], page * page_size + rows.positions % page_size, -1
    )
    sampled = (rows.sampled + shift[:, None]).flatten()
    return ExpandedRows(
        embeds, mixed, positions, slots, (ids[:-1] * wide).int(), counts.int(), sampled
    )


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        block,
        kept,
        newest,
        first,
        hidden,
        embed_tokens,
        mask_embedding,
        mask_hidden,
        mask_id,
        tables,
        ends,
        embeds_out,
        hidden_out,
        positions,
        slots,
        starts,
        counts,
        sampled,
        block_row,
        hidden_row,
        embed_row,
        table_row,
        pages,
        WIDTH: tl.constexpr,
        K: tl.constexpr,
        D: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        WIDE: tl.constexpr = WIDTH + K - 1
        request, local = row // WIDE, (row % WIDE).to(tl.int32)
        count = tl.load(kept + request).to(tl.int32)
        real, live = local <= count, local < count + K
        # whose id: a draft the target confirmed, its newest token, or the mask
        draft = tl.load(block + request * block_row + local + 1, mask=local < count, other=0)
        token = tl.where(local < count, draft, tl.load(newest + request))
        masked = (real == 0) | (token == mask_id)
        position = tl.load(first + request).to(tl.int32) + local
        page = tl.load(
            tables + request * table_row + tl.minimum(position // PAGE, pages - 1),
            mask=live,
            other=0,
        )
        slot = page.to(tl.int64) * PAGE + position % PAGE
        tl.store(positions + row, tl.where(live, position, 0))
        tl.store(slots + row, tl.where(live & (position < tl.load(ends + request)), slot, -1))
        if local == 0:
            tl.store(starts + request, row.to(tl.int32))
            tl.store(counts + request, count + K)
        tl.store(sampled + request * K + (local - count), row, mask=(local >= count) & live)
        dims = tl.arange(0, BLOCK_D)
        there = dims < D
        embed = tl.load(
            embed_tokens + token.to(tl.int64) * embed_row + dims,
            mask=there & live & (masked == 0),
            other=0.0,
        )
        mask = tl.load(mask_embedding + dims, mask=there & live & masked, other=0.0)
        tl.store(
            embeds_out + row * D + dims, tl.where(masked, mask.to(embed.dtype), embed), mask=there
        )
        state = tl.load(
            hidden + (request * WIDTH + local) * hidden_row + dims, mask=there & real, other=0.0
        )
        mask = tl.load(mask_hidden + dims, mask=there & live & (real == 0), other=0.0)
        tl.store(
            hidden_out + row * D + dims, tl.where(real, state, mask.to(state.dtype)), mask=there
        )


def expand_rows(
    block: Tensor,
    kept: Tensor,
    newest: Tensor,
    first: Tensor,
    hidden: Tensor,
    embed_tokens: Tensor,
    mask_embedding: Tensor,
    mask_hidden: Tensor,
    mask_id: int,
    tables: Tensor,
    page_size: int,
    ends: Tensor,
    k: int,
) -> ExpandedRows:
    """block [B, R] verified ids (the newest token then, and its drafts); kept [B] accepted drafts; newest [B] the token
    behind them; first [B] position of block's first token; hidden [B R, d], through fc; embed_tokens [V, d];
    mask_embedding, mask_hidden [d]; tables [B, P] page ids; rows from position ends [B] on store nothing;
    k, at least 1: drafts to be made.
    """
    if triton is None or not (block.is_cuda or triton.knobs.runtime.interpret):
        return reference(
            block,
            kept,
            newest,
            first,
            hidden,
            embed_tokens,
            mask_embedding,
            mask_hidden,
            mask_id,
            tables,
            page_size,
            ends,
            k,
        )
    (batch, width), d = block.shape, hidden.shape[1]
    assert k >= 1 and len(hidden) == batch * width and embed_tokens.shape[1] == d
    assert block.stride(1) == hidden.stride(1) == embed_tokens.stride(1) == tables.stride(1) == 1
    total, device = batch * (width + k - 1), block.device
    out = ExpandedRows(
        embeds=torch.empty(total, d, dtype=embed_tokens.dtype, device=device),
        hidden=torch.empty(total, d, dtype=hidden.dtype, device=device),
        positions=torch.empty(total, dtype=torch.int32, device=device),
        slots=torch.empty(total, dtype=torch.int64, device=device),
        starts=torch.empty(batch, dtype=torch.int32, device=device),
        counts=torch.empty(batch, dtype=torch.int32, device=device),
        sampled=torch.empty(batch * k, dtype=torch.int64, device=device),
    )
    strides = (
        block.stride(0),
        hidden.stride(0),
        embed_tokens.stride(0),
        tables.stride(0),
        tables.shape[1],
    )
    size = triton.next_power_of_2(d)
    sizes: dict[str, Any] = {"WIDTH": width, "K": k, "D": d, "PAGE": page_size, "BLOCK_D": size}
    _kernel[(total,)](
        block,
        kept,
        newest,
        first,
        hidden,
        embed_tokens,
        mask_embedding,
        mask_hidden,
        mask_id,
        tables,
        ends,
        *out,
        *strides,
        **sizes,
        num_warps=min(max(size // 256, 1), 8),
    )
    return out

"""The drafter's rows, expanded from a verified batch: peagle/row_layout.py with a fixed row count.

A block of R verified tokens takes R + K - 1 rows, of which accepted + K are live: the real rows,
then K - 1 mask rows. The rows behind them are dead: position 0, KV slot -1, zeros. The batch
therefore has one shape whatever was accepted, and a CUDA graph can run it. K is the depth of the
next drafts; R - 1 drafts were verified.

    R=4, K=3, block 10 11 12 13 at positions 5..8, 2 drafts accepted, newest 100, mask M:

    row        0    1    2    3    4    5
    id         11   12   100  M    M    dead
    position   5    6    7    8    9    0
    hidden     g5   g6   g7   mask mask 0
    predicts             1st  2nd  3rd draft

Mask rows store their keys and values too: later mask rows attend to them in this pass, and real
rows overwrite them in the next. A program computes one row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.stored_matrix import StoredMatrix, Table
from peagle.kernels.triton import uses_triton
from peagle.row_layout import draft_rows

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None


class VerifiedBlock(NamedTuple):
    """What the target consumed and accepted: B requests with R tokens each."""

    ids: Tensor  # [B, R] int64: the newest token before the pass, and its drafts
    hidden: Tensor  # [B * R, d]: the target's hidden states behind the drafter's fc
    first_positions: Tensor  # [B] int32: the position of a block's first token
    accepted_counts: Tensor  # [B] int32: accepted drafts
    newest: Tensor  # [B] int64: the token behind the accepted drafts
    page_tables: Tensor  # [B, P] int32
    ends: Tensor  # [B] int32: rows from this position on store nothing


class DrafterInputs(NamedTuple):
    """The parameters of a drafter from which the inputs of its rows are taken."""

    embed_tokens: Table  # [V, d]; on a GPU a tensor
    mask_embedding: Tensor  # [d]
    mask_hidden: Tensor  # [d], behind fc
    mask_id: int


class ExpandedRows(NamedTuple):
    """W = R + K - 1 rows per request."""

    embeds: Tensor  # [B * W, d]
    hidden: Tensor  # [B * W, d]
    positions: Tensor  # [B * W] int32
    kv_slots: Tensor  # [B * W] int64; -1: the row stores nothing
    row_starts: Tensor  # [B] int32: b * W
    row_counts: Tensor  # [B] int32: accepted + K
    draft_rows: Tensor  # [B * K] int64: the rows that predict drafts 1..K of each request


def look_up(table: Table, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows `ids` of a table; `dtype`: of the rows of a stored one. An id may be -1."""
    return table.rows(ids).to(dtype) if isinstance(table, StoredMatrix) else table[ids]


def reference(block: VerifiedBlock, inputs: DrafterInputs, page_size: int, k: int) -> ExpandedRows:
    """The same computation in plain PyTorch: the ragged rows of `draft_rows`, moved apart."""
    batch, width = block.ids.shape
    device = block.ids.device
    padded_width = width + k - 1
    total = batch * padded_width
    blocks = torch.arange(batch + 1, device=device)
    rows = draft_rows(
        block.ids.flatten(),
        blocks * width,
        block.first_positions.long(),
        width - 1 - block.accepted_counts.long(),
        block.newest,
        k,
        inputs.mask_id,
    )
    row_counts = rows.starts.diff()  # [B]
    request = torch.repeat_interleave(blocks[:-1], row_counts)
    row_starts = blocks[:-1] * padded_width
    shift = row_starts - rows.starts[:-1]  # from a ragged row of a request to its padded one
    padded_row = torch.arange(len(request), device=device) + shift[request]
    is_mask_id = rows.ids.eq(inputs.mask_id)[:, None]
    token_embeds = look_up(inputs.embed_tokens, rows.ids, block.hidden.dtype)
    embeds = token_embeds.new_zeros(total, token_embeds.shape[1])
    embeds[padded_row] = torch.where(
        is_mask_id, inputs.mask_embedding.to(embeds.dtype), token_embeds
    )
    hidden = block.hidden.new_zeros(total, block.hidden.shape[1])
    hidden[padded_row] = torch.where(
        rows.source[:, None] < 0,
        inputs.mask_hidden.to(hidden.dtype),
        block.hidden[rows.source.clamp(min=0)],
    )
    positions = torch.zeros(total, dtype=torch.int32, device=device)
    positions[padded_row] = rows.positions.int()
    last_page = block.page_tables.shape[1] - 1
    page = block.page_tables[request, (rows.positions // page_size).clamp(max=last_page)].long()
    slots = page * page_size + rows.positions % page_size
    kv_slots = block.ids.new_full((total,), -1)
    kv_slots[padded_row] = torch.where(rows.positions < block.ends[request], slots, -1)
    return ExpandedRows(
        embeds,
        hidden,
        positions,
        kv_slots,
        row_starts.int(),
        row_counts.int(),
        draft_rows=(rows.sampled + shift[:, None]).flatten(),
    )


if triton is not None:

    @triton.jit
    def _expand_rows_kernel(  # type: ignore[no-untyped-def]
        ids_ptr,
        hidden_ptr,
        first_positions_ptr,
        accepted_ptr,
        newest_ptr,
        page_tables_ptr,
        ends_ptr,
        embed_tokens_ptr,
        mask_embedding_ptr,
        mask_hidden_ptr,
        mask_id,
        embeds_out_ptr,
        hidden_out_ptr,
        positions_out_ptr,
        kv_slots_out_ptr,
        row_starts_out_ptr,
        row_counts_out_ptr,
        draft_rows_out_ptr,
        stride_ids_row,
        stride_hidden_row,
        stride_embed_row,
        stride_table_row,
        pages,
        WIDTH: tl.constexpr,
        K: tl.constexpr,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        PADDED_WIDTH: tl.constexpr = WIDTH + K - 1
        request = row // PADDED_WIDTH
        local_row = (row % PADDED_WIDTH).to(tl.int32)
        accepted = tl.load(accepted_ptr + request).to(tl.int32)
        is_real = local_row <= accepted
        is_live = local_row < accepted + K
        # The token is an accepted draft, the newest token, or the mask.
        is_draft = local_row < accepted
        draft_ptr = ids_ptr + request * stride_ids_row + local_row + 1
        draft = tl.load(draft_ptr, mask=is_draft, other=0)
        token = tl.where(is_draft, draft, tl.load(newest_ptr + request))
        is_masked = (is_real == 0) | (token == mask_id)
        position = tl.load(first_positions_ptr + request).to(tl.int32) + local_row
        page_index = tl.minimum(position // PAGE_SIZE, pages - 1)
        page_ptr = page_tables_ptr + request * stride_table_row + page_index
        page = tl.load(page_ptr, mask=is_live, other=0)
        kv_slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        is_stored = is_live & (position < tl.load(ends_ptr + request))
        tl.store(positions_out_ptr + row, tl.where(is_live, position, 0))
        tl.store(kv_slots_out_ptr + row, tl.where(is_stored, kv_slot, -1))
        if local_row == 0:
            tl.store(row_starts_out_ptr + request, row.to(tl.int32))
            tl.store(row_counts_out_ptr + request, accepted + K)
        draft_row_ptr = draft_rows_out_ptr + request * K + (local_row - accepted)
        tl.store(draft_row_ptr, row, mask=(local_row >= accepted) & is_live)
        dims = tl.arange(0, BLOCK_D)
        mask = dims < D
        embed_ptr = embed_tokens_ptr + token.to(tl.int64) * stride_embed_row + dims
        embed = tl.load(embed_ptr, mask=mask & is_live & (is_masked == 0), other=0.0)
        mask_embed = tl.load(mask_embedding_ptr + dims, mask=mask & is_live & is_masked, other=0.0)
        embed = tl.where(is_masked, mask_embed.to(embed.dtype), embed)
        tl.store(embeds_out_ptr + row * D + dims, embed, mask=mask)
        state_ptr = hidden_ptr + (request * WIDTH + local_row) * stride_hidden_row + dims
        state = tl.load(state_ptr, mask=mask & is_real, other=0.0)
        is_mask_row = is_live & (is_real == 0)
        mask_state = tl.load(mask_hidden_ptr + dims, mask=mask & is_mask_row, other=0.0)
        state = tl.where(is_real, state, mask_state.to(state.dtype))
        tl.store(hidden_out_ptr + row * D + dims, state, mask=mask)


def expand_rows(
    block: VerifiedBlock, inputs: DrafterInputs, page_size: int, k: int
) -> ExpandedRows:
    """Expand a verified block into the rows of a drafter's pass that predict k >= 1 drafts."""
    if not uses_triton(block.ids):
        return reference(block, inputs, page_size, k)
    assert isinstance(inputs.embed_tokens, Tensor)
    batch, width = block.ids.shape
    d = block.hidden.shape[1]
    assert k >= 1 and len(block.hidden) == batch * width and inputs.embed_tokens.shape[1] == d
    assert block.ids.stride(1) == block.hidden.stride(1) == block.page_tables.stride(1) == 1
    assert inputs.embed_tokens.stride(1) == 1
    total = batch * (width + k - 1)
    device = block.ids.device
    rows = ExpandedRows(
        embeds=torch.empty(total, d, dtype=inputs.embed_tokens.dtype, device=device),
        hidden=torch.empty(total, d, dtype=block.hidden.dtype, device=device),
        positions=torch.empty(total, dtype=torch.int32, device=device),
        kv_slots=torch.empty(total, dtype=torch.int64, device=device),
        row_starts=torch.empty(batch, dtype=torch.int32, device=device),
        row_counts=torch.empty(batch, dtype=torch.int32, device=device),
        draft_rows=torch.empty(batch * k, dtype=torch.int64, device=device),
    )
    block_d = triton.next_power_of_2(d)
    _expand_rows_kernel[(total,)](
        *block,
        *inputs,
        *rows,
        block.ids.stride(0),
        block.hidden.stride(0),
        inputs.embed_tokens.stride(0),
        block.page_tables.stride(0),
        block.page_tables.shape[1],
        WIDTH=width,
        K=k,
        D=d,
        PAGE_SIZE=page_size,
        BLOCK_D=block_d,
        num_warps=min(max(block_d // 256, 1), 8),
    )
    return rows

"""Attention of a pass over paged keys and values: a Triton kernel on a GPU, a C kernel on a CPU.

Where the C kernel is not available, PyTorch attends in blocks of query rows. The heads of a group
are folded into the rows, so that no key is copied for them, and keys are read in whole pages: a
masked key adds exactly zero. Short passes run in blocks of a fixed number of rows; the bits of a
row then depend neither on its place in the block nor on its neighbors (see exactness.py). A sink is
a key of zeros in front of the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from peagle.kernels.attention_params import UNLIMITED_WINDOW, AttentionHeads, AttentionParams
from peagle.kernels.cpu import ops
from peagle.kernels.row_pass import RowPass, visible_keys
from peagle.kernels.triton.attention.paged_attention import paged_attention
from peagle.kernels.triton.attention.rope_store import rope_store
from peagle.kernels.triton.attention.rotated_attention import (
    rotated_attention,
    supports_rotated_attention,
)
from peagle.kernels.triton.batch_invariant.paged_attention import invariant_attention

BLOCK_ROWS = 8


def attend_qkv(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
    params: AttentionParams,
    split_counters: Tensor | None = None,
) -> Tensor:
    """Rotate q and k, store k and v, and attend; -> [T, heads, d]. qkv: see rope_store.py."""
    args = (qkv, rows, rope_table, key_cache, value_cache, heads)
    if supports_rotated_attention(qkv, rows, key_cache, heads, params):
        return rotated_attention(*args, params, split_counters=split_counters)
    return attend(rope_store(*args), key_cache, value_cache, rows, params, split_counters)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    split_counters: Tensor | None = None,
) -> Tensor:
    """query [T, heads, d]; key_cache, value_cache [slots, kv_heads, d] -> [T, heads, d]."""
    if params.batch_invariant:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return invariant_attention(query, key_cache, value_cache, rows, params, out, split_counters)
    if query.is_cuda or params.softcap is not None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return paged_attention(query, key_cache, value_cache, rows, params, out, split_counters)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if ops.attend(query, key_cache, value_cache, rows, params, out):
        return out
    group = query.shape[1] // key_cache.shape[1]
    blocks = query_blocks(rows, params.window, group, query.dtype)
    batch = rows.cached(
        ("block_batch", params.window, group), lambda: BlockBatch.create(blocks, rows, group)
    )
    if batch is not None:
        out[batch.live_rows] = batch.attend(query, key_cache, value_cache, params)
        return out
    for block in blocks:
        keys, values = block.read(key_cache, rows), block.read(value_cache, rows)
        block_query = query[block.start : block.end]
        out[block.start : block.end] = attend_folded(block_query, keys, values, block.mask, params)
    return out


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive rows of one request, and the keys that they read."""

    request: int
    start: int  # rows start .. end - 1 of the pass
    end: int
    pages: int  # the first pages of the request
    mask: Tensor  # [group * size, pages * page_size], 0 or -inf; size >= end - start

    def read(self, cache: Tensor, rows: RowPass) -> Tensor:
        """The block's keys or values [L, kv_heads, d], as a view if its pages are consecutive."""
        page_size = rows.page_size
        table = rows.page_tables[self.request, : self.pages]
        pages = table.tolist()
        first = pages[0]
        if pages == list(range(first, first + len(pages))):
            return cache[first * page_size : (first + len(pages)) * page_size]
        return cache.unflatten(0, (-1, page_size))[table.long()].flatten(0, 1)


def query_blocks(
    rows: RowPass, window: int | None, group: int, dtype: torch.dtype
) -> list[QueryBlock]:
    """The blocks of a pass, computed once for all of its layers with the same window and group.

    Short passes are cut into blocks of BLOCK_ROWS, and where a page ends: the number of keys that a
    row reads, visible or masked, then depends on its position alone. A prefill is one block, and so
    are rows that do not form a chain.
    """
    return rows.cached(
        ("query_blocks", window, group), lambda: _cut_blocks(rows, window, group, dtype)
    )


def _cut_blocks(
    rows: RowPass, window: int | None, group: int, dtype: torch.dtype
) -> list[QueryBlock]:
    blocks = []
    page_size = rows.page_size
    requests = (x.tolist() for x in (rows.row_starts, rows.row_counts, rows.first_positions))
    for request, (start, count, first) in enumerate(zip(*requests, strict=True)):
        is_chain = rows.tree_masks is None and not rows.bidirectional_rows
        is_short = is_chain and count <= 2 * BLOCK_ROWS
        size = BLOCK_ROWS if is_short else count
        own_rows = slice(start, start + count)
        tree = None
        if rows.tree_masks is not None:
            tree = (rows.tree_masks[own_rows], rows.positions[own_rows])
        done = 0
        while done < count:
            end = min(done + size, count)
            if is_short:
                page_end = page_size * ((first + done) // page_size + 1)
                end = min(end, page_end - first)
            pages = (first + end - 1) // page_size + 1
            visible = visible_keys(
                first + done,
                size,
                torch.arange(pages * page_size),
                UNLIMITED_WINDOW if window is None else window,
                tree,
                rows.bidirectional_rows,
            )
            mask = torch.where(visible, 0.0, float("-inf")).to(dtype).repeat(group, 1)
            blocks.append(QueryBlock(request, start + done, start + end, pages, mask))
            done = end
    return blocks


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Short blocks of several requests in one call, padded to the longest number of keys."""

    query_rows: Tensor  # [B, size] the rows of each block, padded with its first
    live_rows: Tensor  # [live rows] rows of the pass
    live_index: Tensor  # [live rows] where each of them lies among the B * size padded rows
    kv_slots: Tensor  # [B, L]
    mask: Tensor  # [B, 1, group * size, L]

    @classmethod
    def create(cls, blocks: list[QueryBlock], rows: RowPass, group: int) -> "BlockBatch | None":
        """None unless all blocks are short and belong to more than one request."""
        if len({block.request for block in blocks}) < 2:
            return None
        if any(len(block.mask) != BLOCK_ROWS * group for block in blocks):
            return None
        max_pages = max(block.pages for block in blocks)
        query_rows = list[list[int]]()
        live_rows = list[int]()
        live_index = list[int]()
        mask = torch.full(
            (len(blocks), 1, len(blocks[0].mask), max_pages * rows.page_size),
            float("-inf"),
            dtype=blocks[0].mask.dtype,
        )
        for i, block in enumerate(blocks):
            count = block.end - block.start
            own_rows = list(range(block.start, block.end))
            query_rows.append(own_rows + [block.start] * (BLOCK_ROWS - count))
            live_rows += own_rows
            live_index += range(i * BLOCK_ROWS, i * BLOCK_ROWS + count)
            mask[i, 0, :, : block.mask.shape[1]] = block.mask
        requests = torch.tensor([block.request for block in blocks])
        pages = rows.page_tables[requests, :max_pages].long()
        kv_slots = (pages[:, :, None] * rows.page_size + torch.arange(rows.page_size)).flatten(1)
        return cls(
            torch.tensor(query_rows),
            torch.tensor(live_rows),
            torch.tensor(live_index),
            kv_slots,
            mask,
        )

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams
    ) -> Tensor:
        """[live rows, heads, d]"""
        group = query.shape[1] // key_cache.shape[1]
        q = query[self.query_rows].unflatten(2, (-1, group))  # [B, size, kv_heads, group, d]
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, kv_heads, group * size, d]
        k = key_cache[self.kv_slots].transpose(1, 2)  # [B, kv_heads, L, d]
        v = value_cache[self.kv_slots].transpose(1, 2)
        k, v, mask = with_sinks(k, v, self.mask, params.sinks)
        out = scaled_dot_product_attention(q, k, v, mask, scale=params.scale)
        out = out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4)  # [B, size, kv_heads, group, d]
        return out.flatten(0, 1).flatten(1, 2)[self.live_index]


def attend_folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams
) -> Tensor:
    """Attend with the heads of a group folded into the rows.

    query [R, heads, d]; keys, values [L, kv_heads, d]; mask [group * size, L], size >= R.
    """
    count, heads, d = query.shape
    group = heads // keys.shape[1]
    size = len(mask) // group
    q = pad(query, (0, 0, 0, 0, 0, size - count)) if count < size else query
    q = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * size, d]
    k = keys.transpose(0, 1)  # [kv_heads, L, d]
    v = values.transpose(0, 1)
    k, v, mask = with_sinks(k, v, mask, params.sinks)
    out = scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=params.scale)[0]
    return out.unflatten(1, (group, size)).permute(2, 0, 1, 3).reshape(size, heads, d)[:count]


def with_sinks(
    keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key and a value of zeros in front, whose score in the mask is the sink of the head.

    keys, values [.., kv_heads, L, d]; mask [.., group * size, L]; sinks [heads].
    """
    if sinks is None:
        return keys, values, mask
    kv_heads = keys.shape[-3]
    group_rows = mask.shape[-2]
    size = group_rows * kv_heads // len(sinks)
    column = sinks.to(mask.dtype).repeat_interleave(size).view(kv_heads, group_rows, 1)
    mask = mask.expand(*keys.shape[:-2], *mask.shape[-2:])
    mask = torch.cat([column.expand(*mask.shape[:-1], 1), mask], -1)
    return pad(keys, (0, 0, 1, 0)), pad(values, (0, 0, 1, 0)), mask

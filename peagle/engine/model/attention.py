"""Attention of a pass over paged keys and values: a kernel, on a GPU (Triton) and on a CPU (C); else plain PyTorch.

In PyTorch the heads of a group are folded into the rows, so that no key is copied for them, and keys are read in whole
pages: what is masked adds exactly zero. Short passes run in blocks of a fixed number of rows: then a row's bits depend
neither on its place in the block nor on its neighbors (see exactness.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from peagle.engine.model.row_pass import RowPass
from peagle.kernels.cpu import ops
from peagle.kernels.cpu.ops import EVERYTHING
from peagle.kernels.triton.paged_attention import paged_attention, seen_keys

ROWS = 8  # in a block

Block = tuple[
    int, int, int, int, Tensor
]  # request, its rows from..to, pages of keys, mask [group * rows, keys]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: RowPass,
    scale: float,
    window: int | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """query [T, heads, d]; keys, values [slots, kv_heads, d] -> [T, heads, d]. `arrived`: of Memory."""
    if query.is_cuda:
        return paged_attention(
            query,
            keys,
            values,
            rows.tables,
            rows.page,
            rows.starts,
            rows.counts,
            rows.first,
            rows.most,
            scale,
            window=window,
            out=torch.empty(query.shape, dtype=query.dtype, device=query.device),
            arrived=arrived,
            masks=rows.masks,
            positions=rows.positions,
            both=rows.both,
        )
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if ops.attend(
        query,
        keys,
        values,
        rows.tables,
        rows.page,
        rows.starts,
        rows.counts,
        rows.first,
        rows.most,
        scale,
        window,
        out,
        rows.masks,
        rows.positions,
        rows.both,
    ):
        return out
    key = window, query.shape[1] // keys.shape[1]
    if key not in rows.memo:
        blocks = blocks_of(rows, *key, query.dtype)
        several = len({b for b, *_ in blocks}) > 1 and all(
            len(mask) == ROWS * key[1] for *_, mask in blocks
        )
        rows.memo[key] = [Side.of(blocks, rows, query.dtype)] if several else blocks
    for work in rows.memo[key]:
        if isinstance(work, Side):
            out[work.live] = work.attend(query, keys, values, scale)
        else:
            b, start, end, pages, mask = work
            k, v = (read(x, rows.tables[b, :pages], rows.page) for x in (keys, values))
            out[start:end] = folded(query[start:end], k, v, mask, scale)
    return out


@dataclass(frozen=True, slots=True)
class Side:
    """Short blocks of several requests, side by side in one call: keys are copied once, filled up to the longest."""

    take: Tensor  # [B, size] the rows of each block, filled up with its first
    back: Tensor  # [live rows] where a live row came to lie, among B * size
    live: Tensor  # [live rows] rows of the pass
    slots: Tensor  # [B, L]
    mask: Tensor  # [B, 1, group * size, L]

    @staticmethod
    def of(blocks: list[Block], rows: RowPass, dtype: torch.dtype) -> "Side":
        longest = max(pages for _, _, _, pages, _ in blocks)
        take, back, live = list[list[int]](), list[int](), list[int]()
        mask = torch.full(
            (len(blocks), 1, len(blocks[0][4]), longest * rows.page), float("-inf"), dtype=dtype
        )
        for i, (_, start, end, _, seen) in enumerate(blocks):
            take.append([*range(start, end)] + [start] * (ROWS - (end - start)))
            back += range(i * ROWS, i * ROWS + end - start)
            live += range(start, end)
            mask[i, 0, :, : seen.shape[1]] = seen
        tables = rows.tables[torch.tensor([b for b, *_ in blocks]), :longest].long()
        slots = (tables[:, :, None] * rows.page + torch.arange(rows.page)).flatten(1)
        return Side(torch.tensor(take), torch.tensor(back), torch.tensor(live), slots, mask)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[live rows, heads, d]"""
        group = query.shape[1] // keys.shape[1]
        q = (
            query[self.take].unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        )  # [B, kv, group * size, d]
        k, v = (x[self.slots].transpose(1, 2) for x in (keys, values))  # [B, kv_heads, L, d]
        out = scaled_dot_product_attention(q, k, v, self.mask, scale=scale).unflatten(
            2, (group, -1)
        )
        return out.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)[self.back]


def folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [R, heads, d], filled up to `size`; keys, values [L, kv_heads, d]; mask [group * size, L]."""
    count, heads, d = query.shape
    group = heads // keys.shape[1]
    size = len(mask) // group
    q = pad(query, (0, 0, 0, 0, 0, size - count)) if count < size else query
    q = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * size, d]
    k, v = keys.transpose(0, 1), values.transpose(0, 1)  # [kv_heads, L, d]
    out = scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
    return out.unflatten(1, (group, size)).permute(2, 0, 1, 3).reshape(size, heads, d)[:count]


def blocks_of(rows: RowPass, window: int | None, group: int, dtype: torch.dtype) -> list[Block]:
    """Short passes are cut into blocks of ROWS, and where a page ends: how many keys a row is shown, seen or masked,
    then depends on its position alone. A prefill is one block, and so are rows that are no chain."""
    blocks = []
    spans = zip(rows.starts.tolist(), rows.counts.tolist(), rows.first.tolist(), strict=True)
    for b, (start, count, first) in enumerate(spans):
        at = 0
        while at < count:
            short = count <= 2 * ROWS and rows.masks is None and not rows.both
            size = ROWS if short else count
            end = min(
                at + size,
                count,
                rows.page * ((first + at) // rows.page + 1) - first if short else count,
            )
            pages = (first + end - 1) // rows.page + 1
            key, own = torch.arange(pages * rows.page), slice(start, start + count)
            tree = None if rows.masks is None else (rows.masks[own], rows.positions[own])
            seen = seen_keys(
                first + at, size, key, EVERYTHING if window is None else window, tree, rows.both
            )
            mask = torch.where(seen, 0.0, float("-inf")).to(dtype).repeat(group, 1)
            blocks.append((b, start + at, start + end, pages, mask))
            at = end
    return blocks


def read(cache: Tensor, table: Tensor, page: int) -> Tensor:
    """The pages of a request side by side, [L, kv_heads, d]: a view where they lie so."""
    pages = table.tolist()
    first = pages[0]
    if pages == list(range(first, first + len(pages))):
        return cache[first * page : (first + len(table)) * page]
    return cache.unflatten(0, (-1, page))[table.long()].flatten(0, 1)

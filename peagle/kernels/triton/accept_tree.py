"""The acceptance rule for trees: the path the target agrees with, the token behind it, and the places moved on.

The target has read the newest token (row 0) and the nodes of a tree (rows 1..N), and says what follows each row. A node
holds if it is what the target says at its parent's row; it counts if its ancestors hold too. Two children of a row are
two different tokens, so what counts is a path. With sampling this is exact as well: the target's token at a row is
drawn once, so a row's children are tried one after another against what is left of the distribution.

    tree a ab ab' a' (rows 1..4), the target says a at row 0, b' at row 1, c at row 3  ->  path 0 1 3, kept 2, newest c

It also tells what other forms would have kept of the same drafts: how far the chain agrees with what was said, as far
as that goes (kept + 1 tokens), and which rows the path took: nodes are in the order they were grown, so the rows up to
n are what a tree of n nodes keeps.

A request never takes more than it has room for. Shapes: tokens, tops, ids [B, N + 1], first, ends, index [B]; of
every place: trees (grow.py), lengths, emitted, newest [P].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.triton.accept import pack_step_output
from peagle.kernels.triton.build_tree import DraftTrees

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


class AcceptedPath(NamedTuple):
    """Behind `kept` the path has some row; a chain has none."""

    kept: Tensor  # [B] int32
    newest: Tensor  # [B] int64
    path: Tensor | None  # [B, K + 1] int64: the row at each depth
    rows: Tensor | None  # [B * (K + 1)] int64: the same rows among all requests'
    ids: Tensor  # [B, K + 1] their ids
    packed: Tensor  # [B, K + 3] as accept.py has it; of a tree [B, K + 5]: the chain's drafts that hold, path's bits


def reference(
    tokens: Tensor,
    tops: Tensor,
    ids: Tensor,
    trees: DraftTrees,
    first: Tensor,
    ends: Tensor,
    index: Tensor,
    lengths: Tensor,
    emitted: Tensor,
    newest: Tensor,
    k: int,
) -> AcceptedPath:
    """What the kernel computes, in plain PyTorch."""
    rows = ids.shape[1]
    chain, _, parents, depths, masks = trees
    parent, depth, mask = (
        parents[index, : rows - 1].long(),
        depths[index, : rows - 1],
        masks[index, :rows],
    )
    holds = ids[:, 1:] == tokens.gather(1, parent)
    bits = torch.ones_like(mask) << torch.arange(rows, device=ids.device)
    good = 1 + (holds * bits[:, 1:]).sum(1)
    counts = mask & ~good[:, None] == 0  # [B, R]
    depth = torch.cat([torch.zeros_like(depth[:, :1]), depth], 1)
    at = torch.arange(k + 1, device=ids.device)
    on_path = (depth[:, None] == at[:, None]) & counts[:, None]  # [B, K + 1, R]
    path = (on_path * torch.arange(rows, device=ids.device)).sum(-1).clamp(max=rows - 1)
    room = (ends - 1 - first).clamp(min=0, max=k)
    kept = torch.minimum(counts.sum(1) - 1, room).int()
    said = tokens.gather(1, path)
    bonus = said.gather(1, kept[:, None].long())[:, 0]
    lengths[index] = torch.minimum(first + kept + 1, ends)
    emitted[index] += kept + 1
    newest[index] = bonus
    flat = (path + torch.arange(0, ids.numel(), rows, device=ids.device)[:, None]).flatten()
    agrees = (chain[index, :k] == said[:, :k]) & (at[:k] <= kept[:, None])
    taken = (counts & (depth <= kept[:, None])) * bits
    others = agrees.long().cumprod(1).sum(1, keepdim=True), taken.sum(1, keepdim=True)
    packed = torch.cat([pack_step_output(said, tops, kept), *others], 1)
    return AcceptedPath(kept, bonus, path, flat, ids.gather(1, path), packed)


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        tokens,
        tops,
        ids,
        chain,
        parents,
        depths,
        masks,
        first,
        ends,
        index,
        lengths,
        emitted,
        newest,
        kept,
        bonus,
        path,
        flat,
        path_ids,
        packed,
        chain_row,
        nodes_row,
        masks_row,
        ROWS: tl.constexpr,
        K: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        b = tl.program_id(0)
        place = tl.load(index + b)
        row, at = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
        there, node = row < ROWS, (row > 0) & (row < ROWS)
        parent = tl.load(parents + place * nodes_row + row - 1, mask=node, other=0)
        depth = tl.load(depths + place * nodes_row + row - 1, mask=node, other=0)
        mask = tl.load(masks + place * masks_row + row, mask=there, other=-1)
        said = tl.load(tokens + b * ROWS + parent, mask=node, other=0)
        holds = node & (tl.load(ids + b * ROWS + row, mask=node, other=0) == said)
        one = tl.full([BLOCK_R], 1, tl.int64)
        good = tl.sum(tl.where(holds | (row == 0), one << row.to(tl.int64), 0), 0)
        counts = there & ((mask & (good ^ -1)) == 0)
        begin, end = tl.load(first + b).to(tl.int32), tl.load(ends + b).to(tl.int32)
        room = tl.minimum(tl.maximum(end - 1 - begin, 0), K)
        count = tl.minimum(tl.sum(counts.to(tl.int32), 0) - 1, room)
        last = tl.minimum(tl.sum(tl.where(counts & (depth == count), row, 0), 0), ROWS - 1)
        token = tl.load(tokens + b * ROWS + last)
        taken = tl.sum(
            tl.where(counts[:, None] & (depth[:, None] == at[None, :]), row[:, None], 0), 0
        )
        taken = tl.minimum(taken, ROWS - 1)  # whatever a place holds, nothing else is read
        out, inside = b * (K + 1) + at, at <= K
        tl.store(path + out, taken.to(tl.int64), mask=inside)
        tl.store(flat + out, (b * ROWS + taken).to(tl.int64), mask=inside)
        tl.store(path_ids + out, tl.load(ids + b * ROWS + taken, mask=inside, other=0), mask=inside)
        told, follows = (
            packed + b * (K + 5),
            tl.load(tokens + b * ROWS + taken, mask=inside, other=0),
        )
        tl.store(told + at, follows, mask=inside)
        known = tl.minimum(count + 1, K)
        differs = tl.load(chain + place * chain_row + at, mask=at < known, other=0) != follows
        likely = tl.abs(tl.load(tops + b * ROWS + row, mask=there, other=0.0))
        tl.store(told + K + 1, count.to(tl.int64))
        tl.store(told + K + 2, 1 - tl.min((likely < float("inf")).to(tl.int64), 0))
        tl.store(told + K + 3, tl.min(tl.where((at < known) & differs, at, known), 0).to(tl.int64))
        tl.store(
            told + K + 4, tl.sum(tl.where(counts & (depth <= count), one << row.to(tl.int64), 0), 0)
        )
        tl.store(kept + b, count)
        tl.store(bonus + b, token)
        tl.store(lengths + place, tl.minimum(begin + count + 1, end))
        tl.store(emitted + place, tl.load(emitted + place) + count + 1)
        tl.store(newest + place, token)


def accept_tree(
    tokens: Tensor,
    tops: Tensor,
    ids: Tensor,
    trees: DraftTrees,
    first: Tensor,
    ends: Tensor,
    index: Tensor,
    lengths: Tensor,
    emitted: Tensor,
    newest: Tensor,
    k: int,
) -> AcceptedPath:
    """A place may be there twice only if it is nobody's."""
    if triton is None or not (tokens.is_cuda or triton.knobs.runtime.interpret):
        return reference(tokens, tops, ids, trees, first, ends, index, lengths, emitted, newest, k)
    batch, rows = ids.shape
    chain, _, parents, depths, masks = trees
    assert (
        tokens.is_contiguous()
        and tops.is_contiguous()
        and ids.is_contiguous()
        and tokens.shape == ids.shape
    )
    assert (
        parents.stride() == depths.stride()
        and parents.stride(1) == masks.stride(1) == chain.stride(1) == 1
    )
    kept = torch.empty(batch, dtype=torch.int32, device=ids.device)
    bonus = torch.empty(batch, dtype=torch.int64, device=ids.device)
    path, path_ids = torch.empty(2, batch, k + 1, dtype=torch.int64, device=ids.device)
    packed = torch.empty(batch, k + 5, dtype=torch.int64, device=ids.device)
    walked = AcceptedPath(kept, bonus, path, torch.empty_like(path).flatten(), path_ids, packed)
    _kernel[(batch,)](
        tokens,
        tops,
        ids,
        chain,
        parents,
        depths,
        masks,
        first,
        ends,
        index,
        lengths,
        emitted,
        newest,
        *walked,
        chain.stride(0),
        parents.stride(0),
        masks.stride(0),
        ROWS=rows,
        K=k,
        BLOCK_R=triton.next_power_of_2(rows),
        BLOCK_K=triton.next_power_of_2(k + 1),
        num_warps=1,
    )
    return walked

"""The acceptance rule for draft trees: the accepted path, the next token, the slots after it.

The target has read the newest token (row 0) and the nodes of a tree (rows 1..N), and predicts the
token behind each row. A node matches if it equals the prediction at its parent's row, and is
accepted if its ancestors match too. Two children of a row are different tokens, so the accepted
nodes form a path. This is exact with sampling as well: the target's token at a row is drawn once,
so the children of a row are tried one after another against what is left of the distribution.

    tree a ab ab' a' (rows 1..4), target tokens a at row 0, b' at row 1, c at row 3
    ->  path rows 0 1 3, accepted 2, newest c

`packed` (see accept.py) has two more columns. They tell what other draft shapes would accept:

* chain accepted: how many drafts of the chain equal the target's tokens, as far as these are known
  (accepted + 1 tokens);
* path mask: a bit for each row of the path. Nodes are in the order in which the tree grew, so the
  rows up to n are what a tree of n nodes would have accepted.

A request never accepts more than it has room for. Shapes: target_tokens, top_logits and ids
[B, N + 1].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.slot_state import SlotBatch, SlotState
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.accept import (
    ACCEPTED_COLUMN,
    BROKEN_COLUMN,
    CHAIN_ACCEPTED_COLUMN,
    PATH_MASK_COLUMN,
    TREE_COLUMNS,
    pack_step_output,
)
from peagle.kernels.triton.build_tree import DraftTrees

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None


class AcceptedPath(NamedTuple):
    """The rows of a path behind the accepted ones are arbitrary. Chains have no path rows."""

    accepted_counts: Tensor  # [B] int32: accepted drafts
    newest: Tensor  # [B] int64
    path_rows: Tensor | None  # [B, K + 1] int64: the row of the request at each depth
    flat_rows: Tensor | None  # [B * (K + 1)] int64: the same rows among those of all requests
    path_ids: Tensor  # [B, K + 1] int64: the tokens of these rows
    packed: Tensor  # [B, K + 5] int64, or [B, K + 3] for chains


def reference(
    target_tokens: Tensor,
    top_logits: Tensor,
    ids: Tensor,
    trees: DraftTrees,
    batch: SlotBatch,
    state: SlotState,
    k: int,
) -> AcceptedPath:
    """The same computation in plain PyTorch."""
    rows = ids.shape[1]
    slots, first_positions, ends = batch
    row = torch.arange(rows, device=ids.device)
    depths = torch.arange(k + 1, device=ids.device)
    parent = trees.parents[slots, : rows - 1].long()
    depth = trees.depths[slots, : rows - 1]
    depth = torch.cat([torch.zeros_like(depth[:, :1]), depth], 1)  # [B, R]
    tree_mask = trees.masks[slots, :rows]
    matches = ids[:, 1:] == target_tokens.gather(1, parent)
    bits = torch.ones_like(tree_mask) << row
    matching_rows = 1 + (matches * bits[:, 1:]).sum(1)
    accepted = tree_mask & ~matching_rows[:, None] == 0  # [B, R]: the row and its ancestors match
    on_path = (depth[:, None] == depths[:, None]) & accepted[:, None]  # [B, K + 1, R]
    path_rows = (on_path * row).sum(-1).clamp(max=rows - 1)
    room = (ends - 1 - first_positions).clamp(min=0, max=k)
    counts = torch.minimum(accepted.sum(1) - 1, room).int()
    path_tokens = target_tokens.gather(1, path_rows)
    newest = path_tokens.gather(1, counts[:, None].long())[:, 0]
    state.lengths[slots] = torch.minimum(first_positions + counts + 1, ends)
    state.emitted[slots] += counts + 1
    state.newest[slots] = newest
    flat_rows = (
        path_rows + torch.arange(0, ids.numel(), rows, device=ids.device)[:, None]
    ).flatten()
    known = depths[:k] <= counts[:, None]
    chain_matches = (trees.chain[slots, :k] == path_tokens[:, :k]) & known
    chain_accepted = chain_matches.long().cumprod(1).sum(1, keepdim=True)
    path_mask = ((accepted & (depth <= counts[:, None])) * bits).sum(1, keepdim=True)
    packed = torch.cat(
        [pack_step_output(path_tokens, top_logits, counts), chain_accepted, path_mask], 1
    )
    return AcceptedPath(counts, newest, path_rows, flat_rows, ids.gather(1, path_rows), packed)


if triton is not None:
    _ACCEPTED_COLUMN = tl.constexpr(ACCEPTED_COLUMN)
    _BROKEN_COLUMN = tl.constexpr(BROKEN_COLUMN)
    _CHAIN_ACCEPTED_COLUMN = tl.constexpr(CHAIN_ACCEPTED_COLUMN)
    _PATH_MASK_COLUMN = tl.constexpr(PATH_MASK_COLUMN)
    _TREE_COLUMNS = tl.constexpr(TREE_COLUMNS)

    @triton.jit
    def _accept_tree_kernel(  # type: ignore[no-untyped-def]
        target_tokens_ptr,
        top_logits_ptr,
        ids_ptr,
        chain_ptr,
        parents_ptr,
        depths_ptr,
        masks_ptr,
        slots_ptr,
        first_positions_ptr,
        ends_ptr,
        lengths_ptr,
        emitted_ptr,
        newest_ptr,
        accepted_out_ptr,
        newest_out_ptr,
        path_rows_ptr,
        flat_rows_ptr,
        path_ids_ptr,
        packed_ptr,
        stride_chain_row,
        stride_nodes_row,
        stride_masks_row,
        ROWS: tl.constexpr,
        K: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        b = tl.program_id(0)
        slot = tl.load(slots_ptr + b)
        row = tl.arange(0, BLOCK_R)
        depths = tl.arange(0, BLOCK_K)
        row_mask = row < ROWS
        node_mask = (row > 0) & (row < ROWS)
        parent = tl.load(parents_ptr + slot * stride_nodes_row + row - 1, mask=node_mask, other=0)
        depth = tl.load(depths_ptr + slot * stride_nodes_row + row - 1, mask=node_mask, other=0)
        tree_mask = tl.load(masks_ptr + slot * stride_masks_row + row, mask=row_mask, other=-1)
        predicted = tl.load(target_tokens_ptr + b * ROWS + parent, mask=node_mask, other=0)
        token = tl.load(ids_ptr + b * ROWS + row, mask=node_mask, other=0)
        matches = node_mask & (token == predicted)
        bits = tl.full([BLOCK_R], 1, tl.int64) << row.to(tl.int64)
        matching_rows = tl.sum(tl.where(matches | (row == 0), bits, 0), 0)
        accepted = row_mask & ((tree_mask & (matching_rows ^ -1)) == 0)
        first = tl.load(first_positions_ptr + b).to(tl.int32)
        end = tl.load(ends_ptr + b).to(tl.int32)
        room = tl.minimum(tl.maximum(end - 1 - first, 0), K)
        count = tl.minimum(tl.sum(accepted.to(tl.int32), 0) - 1, room)
        last_row = tl.sum(tl.where(accepted & (depth == count), row, 0), 0)
        newest = tl.load(target_tokens_ptr + b * ROWS + tl.minimum(last_row, ROWS - 1))
        on_path = accepted[:, None] & (depth[:, None] == depths[None, :])
        # The limit keeps reads in range, whatever the tree of an unused slot holds.
        path_row = tl.minimum(tl.sum(tl.where(on_path, row[:, None], 0), 0), ROWS - 1)

        path_mask = depths <= K
        offsets = b * (K + 1) + depths
        path_id = tl.load(ids_ptr + b * ROWS + path_row, mask=path_mask, other=0)
        tl.store(path_rows_ptr + offsets, path_row.to(tl.int64), mask=path_mask)
        tl.store(flat_rows_ptr + offsets, (b * ROWS + path_row).to(tl.int64), mask=path_mask)
        tl.store(path_ids_ptr + offsets, path_id, mask=path_mask)

        packed_row = packed_ptr + b * (K + _TREE_COLUMNS)
        path_token = tl.load(target_tokens_ptr + b * ROWS + path_row, mask=path_mask, other=0)
        known = tl.minimum(count + 1, K)
        chain = tl.load(chain_ptr + slot * stride_chain_row + depths, mask=depths < known, other=0)
        differs = (depths < known) & (chain != path_token)
        top_size = tl.abs(tl.load(top_logits_ptr + b * ROWS + row, mask=row_mask, other=0.0))
        broken = 1 - tl.min((top_size < float("inf")).to(tl.int64), 0)
        chain_accepted = tl.min(tl.where(differs, depths, known), 0)
        path_bits = tl.sum(tl.where(accepted & (depth <= count), bits, 0), 0)
        tl.store(packed_row + depths, path_token, mask=path_mask)
        tl.store(packed_row + K + _ACCEPTED_COLUMN, count.to(tl.int64))
        tl.store(packed_row + K + _BROKEN_COLUMN, broken)
        tl.store(packed_row + K + _CHAIN_ACCEPTED_COLUMN, chain_accepted.to(tl.int64))
        tl.store(packed_row + K + _PATH_MASK_COLUMN, path_bits)
        tl.store(accepted_out_ptr + b, count)
        tl.store(newest_out_ptr + b, newest)
        tl.store(lengths_ptr + slot, tl.minimum(first + count + 1, end))
        tl.store(emitted_ptr + slot, tl.load(emitted_ptr + slot) + count + 1)
        tl.store(newest_ptr + slot, newest)


def accept_tree(
    target_tokens: Tensor,
    top_logits: Tensor,
    ids: Tensor,
    trees: DraftTrees,
    batch: SlotBatch,
    state: SlotState,
    k: int,
) -> AcceptedPath:
    """Accept a path of each request's tree (of depth k at most) and update `state`."""
    if not uses_triton(target_tokens):
        return reference(target_tokens, top_logits, ids, trees, batch, state, k)
    requests, rows = ids.shape
    assert all(x.is_contiguous() for x in (target_tokens, top_logits, ids))
    assert target_tokens.shape == ids.shape and trees.parents.stride() == trees.depths.stride()
    assert trees.parents.stride(1) == trees.masks.stride(1) == trees.chain.stride(1) == 1
    path_rows, path_ids = torch.empty(2, requests, k + 1, dtype=torch.int64, device=ids.device)
    result = AcceptedPath(
        accepted_counts=torch.empty(requests, dtype=torch.int32, device=ids.device),
        newest=torch.empty(requests, dtype=torch.int64, device=ids.device),
        path_rows=path_rows,
        flat_rows=torch.empty_like(path_rows).flatten(),
        path_ids=path_ids,
        packed=torch.empty(requests, k + TREE_COLUMNS, dtype=torch.int64, device=ids.device),
    )
    _accept_tree_kernel[(requests,)](
        target_tokens,
        top_logits,
        ids,
        trees.chain,
        trees.parents,
        trees.depths,
        trees.masks,
        *batch,
        state.lengths,
        state.emitted,
        state.newest,
        *result,
        trees.chain.stride(0),
        trees.parents.stride(0),
        trees.masks.stride(0),
        ROWS=rows,
        K=k,
        BLOCK_R=triton.next_power_of_2(rows),
        BLOCK_K=triton.next_power_of_2(k + 1),
        num_warps=1,
    )
    return result

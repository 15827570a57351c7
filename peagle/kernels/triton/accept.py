"""The acceptance rule for chains: accepted drafts, the next token, and the slots after it.

The target has read the newest token and K drafts, and predicts the token behind each of them. A
draft is accepted while it equals the prediction for its place; the prediction behind the last
accepted draft becomes the newest token. A request never accepts more than it has room for.

    K=3, drafts 7 8 9, target tokens 7 8 5 6   ->  accepted 2, newest 5
    the same with room for one draft           ->  accepted 1, newest 8

Shapes: target_tokens and top_logits (their logits) [B, K + 1], drafts [B, K].

The host reads one tensor per step, `packed` [B, K + 3] int64 for chains and [B, K + 5] for trees:

    column          0 .. K          K + 1      K + 2    K + 3            K + 4
    holds           target tokens   accepted   broken   chain accepted   path mask
                                                        (trees only)     (trees only)

`accepted` counts accepted drafts, so the first accepted + 1 target tokens are new. `broken` is 1 if
some row has no finite largest logit. The columns of trees are described in accept_tree.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.slot_state import SlotBatch, SlotState
from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

REQUESTS_PER_PROGRAM = 16

# Columns of `packed`, relative to K:
ACCEPTED_COLUMN = 1
BROKEN_COLUMN = 2
CHAIN_ACCEPTED_COLUMN = 3
PATH_MASK_COLUMN = 4
CHAIN_COLUMNS = 3
TREE_COLUMNS = 5


class AcceptedChain(NamedTuple):
    accepted_counts: Tensor  # [B] int32: accepted drafts
    newest: Tensor  # [B] int64
    packed: Tensor  # [B, K + 3] int64


def reference(
    target_tokens: Tensor, top_logits: Tensor, drafts: Tensor, batch: SlotBatch, state: SlotState
) -> AcceptedChain:
    """The same computation in plain PyTorch."""
    matches = (drafts == target_tokens[:, : drafts.shape[1]]).long()
    room = (batch.ends - 1 - batch.first_positions).clamp(min=0).long()
    accepted = torch.minimum(matches.cumprod(1).sum(1), room)
    newest = target_tokens.gather(1, accepted[:, None])[:, 0]
    accepted = accepted.int()
    # The padding slot ends at 0, and its length stays 0.
    state.lengths[batch.slots] = torch.minimum(batch.first_positions + accepted + 1, batch.ends)
    state.emitted[batch.slots] += accepted + 1
    state.newest[batch.slots] = newest
    return AcceptedChain(accepted, newest, pack_step_output(target_tokens, top_logits, accepted))


def pack_step_output(target_tokens: Tensor, top_logits: Tensor, accepted: Tensor) -> Tensor:
    """[B, K + 3]: the columns that chains and trees share.

    A row is broken if it holds a NaN (whose top logit is +inf, see argmax.py), +inf, or only -inf.
    """
    broken = ~top_logits.isfinite().all(-1)
    return torch.cat([target_tokens, accepted[:, None], broken[:, None]], 1)


if triton is not None:
    _ACCEPTED_COLUMN = tl.constexpr(ACCEPTED_COLUMN)
    _BROKEN_COLUMN = tl.constexpr(BROKEN_COLUMN)
    _CHAIN_COLUMNS = tl.constexpr(CHAIN_COLUMNS)

    @triton.jit(do_not_specialize=["batch"])  # one kernel for all batch sizes
    def _accept_kernel(  # type: ignore[no-untyped-def]
        target_tokens_ptr,
        top_logits_ptr,
        drafts_ptr,
        slots_ptr,
        first_positions_ptr,
        ends_ptr,
        lengths_ptr,
        emitted_ptr,
        newest_ptr,
        accepted_out_ptr,
        newest_out_ptr,
        packed_ptr,
        batch,
        stride_drafts_row,
        K: tl.constexpr,
        BLOCK_B: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
        cols = tl.arange(0, BLOCK_K)
        mask = request < batch
        draft_mask = mask[:, None] & (cols[None, :] < K)
        token_mask = mask[:, None] & (cols[None, :] <= K)
        offsets = request[:, None] * (K + 1) + cols[None, :]
        target_token = tl.load(target_tokens_ptr + offsets, mask=token_mask, other=0)
        top_size = tl.abs(tl.load(top_logits_ptr + offsets, mask=token_mask, other=0.0))
        draft_offsets = request[:, None] * stride_drafts_row + cols[None, :]
        draft = tl.load(drafts_ptr + draft_offsets, mask=draft_mask, other=0)
        differs = draft_mask & (target_token != draft)
        first_rejected = tl.min(tl.where(differs, cols[None, :], K), 1)
        first_position = tl.load(first_positions_ptr + request, mask=mask, other=0).to(tl.int32)
        room = tl.load(ends_ptr + request, mask=mask, other=0).to(tl.int32) - 1 - first_position
        accepted = tl.minimum(first_rejected, tl.maximum(room, 0))
        newest = tl.load(target_tokens_ptr + request * (K + 1) + accepted, mask=mask, other=0)
        broken = 1 - tl.min((top_size < float("inf")).to(tl.int64), 1)
        packed_row = packed_ptr + request * (K + _CHAIN_COLUMNS)
        tl.store(packed_row[:, None] + cols[None, :], target_token, mask=token_mask)
        tl.store(packed_row + K + _ACCEPTED_COLUMN, accepted.to(tl.int64), mask=mask)
        tl.store(packed_row + K + _BROKEN_COLUMN, broken, mask=mask)
        tl.store(accepted_out_ptr + request, accepted, mask=mask)
        tl.store(newest_out_ptr + request, newest, mask=mask)
        slot = tl.load(slots_ptr + request, mask=mask, other=0)
        emitted = tl.load(emitted_ptr + slot, mask=mask, other=0)
        length = tl.minimum(first_position + accepted + 1, first_position + room + 1)
        tl.store(lengths_ptr + slot, length, mask=mask)
        tl.store(emitted_ptr + slot, emitted + accepted + 1, mask=mask)
        tl.store(newest_ptr + slot, newest, mask=mask)


def accept(
    target_tokens: Tensor, top_logits: Tensor, drafts: Tensor, batch: SlotBatch, state: SlotState
) -> AcceptedChain:
    """Accept drafts and update `state`. With K = 0 the only target token becomes the newest."""
    if not uses_triton(target_tokens):
        return reference(target_tokens, top_logits, drafts, batch, state)
    requests, k = drafts.shape
    device = target_tokens.device
    assert target_tokens.shape == (requests, k + 1)
    assert all(x.shape == (requests,) for x in batch)
    assert target_tokens.is_contiguous() and top_logits.is_contiguous()
    assert k == 0 or drafts.stride(1) == 1
    result = AcceptedChain(
        accepted_counts=torch.empty(requests, dtype=torch.int32, device=device),
        newest=torch.empty(requests, dtype=torch.int64, device=device),
        packed=torch.empty(requests, k + CHAIN_COLUMNS, dtype=torch.int64, device=device),
    )
    _accept_kernel[(triton.cdiv(requests, REQUESTS_PER_PROGRAM),)](
        target_tokens,
        top_logits,
        drafts,
        *batch,
        state.lengths,
        state.emitted,
        state.newest,
        *result,
        requests,
        drafts.stride(0),
        K=k,
        BLOCK_B=REQUESTS_PER_PROGRAM,
        BLOCK_K=triton.next_power_of_2(k + 1),
        num_warps=1,
    )
    return result

"""The greedy acceptance rule for a batch: how many drafts hold, and the token behind them.

The target has read the newest token and K drafts, and says what follows each. Drafts count as long as they are what the
target says; the token it says behind the last of them is the bonus. A request never takes more than it has room for.

    K=3, drafts 7 8 9, tokens 7 8 5 6  ->  kept 2, newest 5
    the same with room 1               ->  kept 1, newest 8

Shapes: tokens [B, K + 1], drafts [B, K], room [B]. Results: kept [B] int32, newest [B] int64.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

REQUESTS = 16  # of a program


def reference(tokens: Tensor, drafts: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch."""
    holds = (drafts == tokens[:, : drafts.shape[1]]).long()
    kept = torch.minimum(holds.cumprod(1).sum(1), room.long())
    return kept.int(), tokens.gather(1, kept[:, None])[:, 0]


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        tokens, drafts, room, kept, newest, batch, tokens_row, drafts_row,
        K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        request, cols = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
        there = request < batch
        both = there[:, None] & (cols[None, :] < K)
        said = tl.load(tokens + request[:, None] * tokens_row + cols[None, :], mask=both, other=0)
        drafted = tl.load(drafts + request[:, None] * drafts_row + cols[None, :], mask=both, other=0)
        leading = tl.min(tl.where(both & (said != drafted), cols[None, :], K), 1)  # the first that fails
        count = tl.minimum(leading, tl.load(room + request, mask=there, other=0).to(tl.int32))
        tl.store(kept + request, count, mask=there)
        tl.store(newest + request, tl.load(tokens + request * tokens_row + count, mask=there, other=0), mask=there)


def accept(tokens: Tensor, drafts: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """(kept, newest). room is at least 0. K may be 0: then nothing is kept, and newest is the only token."""
    if triton is None or not (tokens.is_cuda or triton.knobs.runtime.interpret):
        return reference(tokens, drafts, room)
    batch, k = drafts.shape
    assert tokens.shape == (batch, k + 1) and room.shape == (batch,)
    assert tokens.stride(1) == 1 and (k == 0 or drafts.stride(1) == 1)
    kept = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    newest = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    _kernel[(triton.cdiv(batch, REQUESTS),)](
        tokens, drafts, room, kept, newest, batch, tokens.stride(0), drafts.stride(0),
        K=k, BLOCK_B=REQUESTS, BLOCK_K=triton.next_power_of_2(max(k, 1)), num_warps=1,
    )  # fmt: skip
    return kept, newest

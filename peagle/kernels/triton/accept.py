"""The greedy acceptance rule for a batch: how many drafts hold, the token behind them, and the places moved on.

The target has read the newest token and K drafts, and says what follows each. Drafts count as long as they are what the
target says; the token it says behind the last of them is the bonus. A request never takes more than it has room for.

    K=3, drafts 7 8 9, tokens 7 8 5 6  ->  kept 2, newest 5
    the same with room 1               ->  kept 1, newest 8

Shapes: tokens and tops (how likely each is) [B, K + 1], drafts [B, K], first (the position of the newest token) and
ends [B], index [B] the places; of every place: lengths, emitted, newest. Results: kept [B] int32, newest [B] int64,
packed [B, K + 3] int64: the tokens, kept, and whether a row has no likeliest token that is finite.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

REQUESTS = 16  # of a program


def reference(
    tokens: Tensor,
    tops: Tensor,
    drafts: Tensor,
    first: Tensor,
    ends: Tensor,
    index: Tensor,
    lengths: Tensor,
    emitted: Tensor,
    newest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch."""
    holds = (drafts == tokens[:, : drafts.shape[1]]).long()
    room = (ends - 1 - first).clamp(min=0).long()
    kept = torch.minimum(holds.cumprod(1).sum(1), room)
    bonus = tokens.gather(1, kept[:, None])[:, 0]
    kept = kept.int()
    lengths[index] = torch.minimum(
        first + kept + 1, ends
    )  # nobody's place ends at 0, and stays there
    emitted[index] += kept + 1
    newest[index] = bonus
    return kept, bonus, pack_step_output(tokens, tops, kept)


def pack_step_output(tokens: Tensor, tops: Tensor, kept: Tensor) -> Tensor:
    """Broken: some row has a NaN (which `best` tells as +inf), +inf, or nothing but -inf."""
    broken = ~tops.isfinite().all(-1)
    return torch.cat([tokens, kept[:, None], broken[:, None]], 1)


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        tokens,
        tops,
        drafts,
        first,
        ends,
        index,
        lengths,
        emitted,
        newest,
        kept,
        bonus,
        packed,
        batch,
        drafts_row,
        K: tl.constexpr,
        BLOCK_B: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        request, cols = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
        there = request < batch
        both = there[:, None] & (cols[None, :] < K)
        rows = there[:, None] & (cols[None, :] <= K)
        at = request[:, None] * (K + 1) + cols[None, :]
        said = tl.load(tokens + at, mask=rows, other=0)
        likely = tl.abs(tl.load(tops + at, mask=rows, other=0.0))
        drafted = tl.load(
            drafts + request[:, None] * drafts_row + cols[None, :], mask=both, other=0
        )
        leading = tl.min(
            tl.where(both & (said != drafted), cols[None, :], K), 1
        )  # the first that fails
        begin = tl.load(first + request, mask=there, other=0).to(tl.int32)
        room = tl.load(ends + request, mask=there, other=0).to(tl.int32) - 1 - begin
        count = tl.minimum(leading, tl.maximum(room, 0))
        token = tl.load(tokens + request * (K + 1) + count, mask=there, other=0)
        broken = 1 - tl.min((likely < float("inf")).to(tl.int64), 1)
        out = packed + request * (K + 3)
        tl.store(out[:, None] + cols[None, :], said, mask=rows)
        tl.store(out + K + 1, count.to(tl.int64), mask=there)
        tl.store(out + K + 2, broken, mask=there)
        tl.store(kept + request, count, mask=there)
        tl.store(bonus + request, token, mask=there)
        place = tl.load(index + request, mask=there, other=0)
        told = tl.load(emitted + place, mask=there, other=0)
        tl.store(lengths + place, tl.minimum(begin + count + 1, begin + room + 1), mask=there)
        tl.store(emitted + place, told + count + 1, mask=there)
        tl.store(newest + place, token, mask=there)


def accept(
    tokens: Tensor,
    tops: Tensor,
    drafts: Tensor,
    first: Tensor,
    ends: Tensor,
    index: Tensor,
    lengths: Tensor,
    emitted: Tensor,
    newest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """A place may be there twice only if it is nobody's. With K = 0 newest is the only token."""
    if triton is None or not (tokens.is_cuda or triton.knobs.runtime.interpret):
        return reference(tokens, tops, drafts, first, ends, index, lengths, emitted, newest)
    batch, k = drafts.shape
    assert tokens.shape == (batch, k + 1) and first.shape == ends.shape == index.shape == (batch,)
    assert tokens.is_contiguous() and tops.is_contiguous() and (k == 0 or drafts.stride(1) == 1)
    kept = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    bonus = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    packed = torch.empty(batch, k + 3, dtype=torch.int64, device=tokens.device)
    _kernel[(triton.cdiv(batch, REQUESTS),)](
        tokens,
        tops,
        drafts,
        first,
        ends,
        index,
        lengths,
        emitted,
        newest,
        kept,
        bonus,
        packed,
        batch,
        drafts.stride(0),
        K=k,
        BLOCK_B=REQUESTS,
        BLOCK_K=triton.next_power_of_2(k + 1),
        num_warps=1,
    )
    return kept, bonus, packed

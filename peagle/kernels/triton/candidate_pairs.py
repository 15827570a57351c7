"""Log-probabilities of neighboring candidates, corrected by the draft before (drafter/dependency.py): one launch.

For row k of a block and its candidate i, behind candidate j of row k - 1:

    logit[j, i] = value[i] + factor * silu(here + before[j]) . after[i]        row 0: value[i]
    logp[j, i]  = logit[j, i] - log(sum over i of exp(logit[j, i]) + rest)     rest: what the other tokens had

Shapes: ids [T, M] of rows in blocks of K, values [T, M], totals and factor [T] (of `candidates`); here [T, r]; before
and after [V, r], a row a token of the draft vocabulary. Result [T, M, M] float32.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


def reference(
    ids: Tensor,
    values: Tensor,
    totals: Tensor,
    factor: Tensor,
    here: Tensor,
    before: Tensor,
    after: Tensor,
    k: int,
) -> Tensor:
    """What the kernel computes, in plain PyTorch and float32."""
    previous = ids.roll(1, 0)  # of the row before; row 0 of a block takes none
    between = silu(here.float()[:, None] + before[previous].float())  # [T, M before, r]
    added = factor[:, None, None] * (
        between @ after[ids].float().transpose(1, 2)
    )  # [T, M before, M]
    added[::k] = 0
    logits = (values - totals[:, None])[:, None] + added
    rest = (1 - (values - totals[:, None]).exp().sum(1)).clamp(min=1e-30)
    return logits - torch.logaddexp(logits.logsumexp(-1), rest.log()[:, None])[..., None]


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        ids,
        values,
        totals,
        factor,
        here,
        before,
        after,
        out,
        K,
        here_row,
        COUNT: tl.constexpr,
        RANK: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_R: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        at, r = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
        there = at < COUNT
        value = tl.load(values + row * COUNT + at, mask=there, other=-float("inf"))
        top = tl.max(value, 0)
        total = tl.load(totals + row)
        rest = tl.maximum(tl.exp(total - top) - tl.sum(tl.exp(value - top), 0), 0.0)
        added = tl.zeros([BLOCK, BLOCK], tl.float32)
        if row % K > 0:
            mine = tl.load(ids + row * COUNT + at, mask=there, other=0)
            theirs = tl.load(ids + (row - 1) * COUNT + at, mask=there, other=0)
            for begin in range(0, RANK, BLOCK_R):
                inside = begin + r < RANK
                own = tl.load(here + row * here_row + begin + r, mask=inside, other=0.0).to(
                    tl.float32
                )
                both = there[:, None] & inside[None, :]
                x = tl.load(
                    before + theirs[:, None] * RANK + begin + r[None, :], mask=both, other=0.0
                ).to(tl.float32)
                x = x + own[None, :]
                x = tl.where(both, x / (1.0 + tl.exp(-x)), 0.0)  # [before, r]
                y = tl.load(
                    after + mine[:, None] * RANK + begin + r[None, :], mask=both, other=0.0
                ).to(tl.float32)
                added = tl.dot(x, tl.trans(y), added, input_precision="ieee")
            added = added * tl.load(factor + row)
        logits = value[None, :] + added
        largest = tl.max(tl.where(there[None, :], logits, -float("inf")), 1)
        largest = tl.maximum(largest, top)
        sums = tl.sum(tl.where(there[None, :], tl.exp(logits - largest[:, None]), 0.0), 1)
        norm = largest + tl.log(sums + rest * tl.exp(top - largest))
        where = row * COUNT * COUNT + at[:, None] * COUNT + at[None, :]
        tl.store(out + where, logits - norm[:, None], mask=there[:, None] & there[None, :])


def candidate_pairs(
    ids: Tensor,
    values: Tensor,
    totals: Tensor,
    factor: Tensor,
    here: Tensor,
    before: Tensor,
    after: Tensor,
    k: int,
) -> Tensor:
    """[T, M, M]: of candidate i (last) behind candidate j. `before` and `after` must be contiguous."""
    if triton is None or not (values.is_cuda or triton.knobs.runtime.interpret):
        return reference(ids, values, totals, factor, here, before, after, k)
    rows, count = ids.shape
    rank = before.shape[1]
    assert (
        all(x.is_contiguous() for x in (ids, values, before, after)) and before.shape == after.shape
    )
    assert here.stride(1) == 1
    out = torch.empty(rows, count, count, dtype=torch.float32, device=values.device)
    _kernel[(rows,)](
        ids,
        values,
        totals,
        factor,
        here,
        before,
        after,
        out,
        k,
        here.stride(0),
        COUNT=count,
        RANK=rank,
        BLOCK=max(16, triton.next_power_of_2(count)),
        BLOCK_R=64,
        num_warps=4,
    )
    return out

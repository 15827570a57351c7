"""Log-probabilities of candidates, corrected for the draft before (drafter/dependency.py).

For row k of a block and its candidate i, behind candidate j of row k - 1:

    logit[j, i] = value[i] + factor * silu(here + before[j]) . after[i]        row 0: value[i]
    logp[j, i]  = logit[j, i] - log(sum over i of exp(logit[j, i]) + rest)

`value` are the logits of the candidates, `rest` is the sum of exponentials of all other tokens.
A program computes one row.

Shapes: candidates of T rows in blocks of K rows, M of each; factor [T]; result [T, M, M] float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.candidates import Candidates

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

BLOCK_RANK = 64


class DependencyTerms(NamedTuple):
    """The low-rank correction; V is the size of the draft vocabulary."""

    here: Tensor  # [T, r]
    before: Tensor  # [V, r], contiguous
    after: Tensor  # [V, r], contiguous


def reference(candidates: Candidates, factor: Tensor, terms: DependencyTerms, k: int) -> Tensor:
    """The same computation in plain PyTorch and float32."""
    ids = candidates.ids
    previous_ids = ids.roll(1, 0)  # of the row before; the first row of a block is not corrected
    # [T, M before, r]
    mixed = silu(terms.here.float()[:, None] + terms.before[previous_ids].float())
    # [T, M before, M]
    correction = factor[:, None, None] * (mixed @ terms.after[ids].float().transpose(1, 2))
    correction[::k] = 0
    logp = candidates.logits - candidates.logsumexp[:, None]
    logits = logp[:, None] + correction
    rest = (1 - logp.exp().sum(1)).clamp(min=1e-30)
    return logits - torch.logaddexp(logits.logsumexp(-1), rest.log()[:, None])[..., None]


if triton is not None:

    @triton.jit
    def _candidate_pairs_kernel(  # type: ignore[no-untyped-def]
        ids_ptr,
        values_ptr,
        logsumexp_ptr,
        factor_ptr,
        here_ptr,
        before_ptr,
        after_ptr,
        out_ptr,
        K,
        stride_here_row,
        COUNT: tl.constexpr,
        RANK: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_R: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        col = tl.arange(0, BLOCK_M)
        mask = col < COUNT
        value = tl.load(values_ptr + row * COUNT + col, mask=mask, other=-float("inf"))
        top = tl.max(value, 0)
        logsumexp = tl.load(logsumexp_ptr + row)
        rest = tl.maximum(tl.exp(logsumexp - top) - tl.sum(tl.exp(value - top), 0), 0.0)
        correction = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
        if row % K > 0:
            token = tl.load(ids_ptr + row * COUNT + col, mask=mask, other=0)
            previous = tl.load(ids_ptr + (row - 1) * COUNT + col, mask=mask, other=0)
            for start in range(0, RANK, BLOCK_R):
                rank = start + tl.arange(0, BLOCK_R)
                here_row_ptr = here_ptr + row * stride_here_row
                here = tl.load(here_row_ptr + rank, mask=rank < RANK, other=0.0).to(tl.float32)
                tile_mask = mask[:, None] & (rank < RANK)[None, :]
                before_tile_ptr = before_ptr + previous[:, None] * RANK + rank[None, :]
                x = tl.load(before_tile_ptr, mask=tile_mask, other=0.0).to(tl.float32)
                x = x + here[None, :]
                x = tl.where(tile_mask, x / (1.0 + tl.exp(-x)), 0.0)  # [M before, r]
                after_tile_ptr = after_ptr + token[:, None] * RANK + rank[None, :]
                y = tl.load(after_tile_ptr, mask=tile_mask, other=0.0).to(tl.float32)
                correction = tl.dot(x, tl.trans(y), correction, input_precision="ieee")
            correction = correction * tl.load(factor_ptr + row)
        logits = value[None, :] + correction
        largest = tl.max(tl.where(mask[None, :], logits, -float("inf")), 1)
        largest = tl.maximum(largest, top)
        sums = tl.sum(tl.where(mask[None, :], tl.exp(logits - largest[:, None]), 0.0), 1)
        norm = largest + tl.log(sums + rest * tl.exp(top - largest))
        offsets = row * COUNT * COUNT + col[:, None] * COUNT + col[None, :]
        tl.store(out_ptr + offsets, logits - norm[:, None], mask=mask[:, None] & mask[None, :])


def candidate_pairs(
    candidates: Candidates, factor: Tensor, terms: DependencyTerms, k: int
) -> Tensor:
    """[T, M, M]: the log-probability of candidate i (last index) behind candidate j."""
    if not uses_triton(candidates.logits):
        return reference(candidates, factor, terms, k)
    rows, count = candidates.ids.shape
    assert candidates.ids.is_contiguous() and candidates.logits.is_contiguous()
    assert terms.before.is_contiguous() and terms.after.is_contiguous()
    assert terms.before.shape == terms.after.shape and terms.here.stride(1) == 1
    out = torch.empty(rows, count, count, dtype=torch.float32, device=candidates.logits.device)
    _candidate_pairs_kernel[(rows,)](
        *candidates,
        factor,
        *terms,
        out,
        k,
        terms.here.stride(0),
        COUNT=count,
        RANK=terms.before.shape[1],
        BLOCK_M=max(16, triton.next_power_of_2(count)),
        BLOCK_R=BLOCK_RANK,
        num_warps=4,
    )
    return out

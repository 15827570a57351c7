"""The M most likely tokens of each row of logits, in descending order, and the row's log-sum-exp.

There are two launches. The first finds the largest logit of each group of neighbors. The second
reads the M groups with the largest of these again, and takes the M largest logits of them: the
maxima of those M groups come before every logit of another group. Of equal logits, the first comes
first. `factor` multiplies the logits of a row (calibration).

    logits 1 3 2, factor 2, M=2  ->  ids 1 2, logits 6 4, logsumexp 6.14
    groups of two, M=2: 1 3 | 9 8 | 2 0  ->  largest 3 9 2  ->  groups 0 1  ->  logits 9 8

Shapes: logits [T, V], factor [T].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

GROUP_SIZE = 128  # neighboring logits, of which the first launch keeps the largest
PIECE_GROUPS = 16  # of one program


class Candidates(NamedTuple):
    """logits - logsumexp are log-probabilities."""

    ids: Tensor  # [T, M] int64
    logits: Tensor  # [T, M] float32, multiplied by the row's factor
    logsumexp: Tensor  # [T] float32


def reference(logits: Tensor, factor: Tensor, count: int) -> Candidates:
    """The same computation in plain PyTorch."""
    scaled = logits.float() * factor[:, None]
    top_logits, ids = scaled.topk(count)
    return Candidates(ids, top_logits, scaled.logsumexp(-1))


if triton is not None:
    _SMALLEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)

    @triton.jit
    def _sort_key(x, index):  # type: ignore[no-untyped-def]
        """An integer that grows with x and, among equals, falls with the index."""
        bits = x.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)

    @triton.jit
    def _key_value(key):  # type: ignore[no-untyped-def]
        ordered = (key >> 32).to(tl.int32)
        return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    @triton.jit
    def _key_index(key):  # type: ignore[no-untyped-def]
        return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)

    @triton.jit
    def _groups_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        factor_ptr,
        keys_ptr,
        sums_ptr,
        stride_logits_row,
        vocab_size,
        groups,
        GROUPS: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        """Store the largest sort key of each group, and the piece's maximum and exponentials."""
        row = tl.program_id(0).to(tl.int64)
        piece = tl.program_id(1)
        group = piece * GROUPS + tl.arange(0, GROUPS)
        col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        row_ptr = logits_ptr + row * stride_logits_row
        x = tl.load(row_ptr + col, mask=col < vocab_size, other=-float("inf")).to(tl.float32)
        x = x * tl.load(factor_ptr + row)
        tops, index = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=True)
        keys = _sort_key(tops, group * GROUP + index)
        tl.store(keys_ptr + row * groups + group, keys, mask=group < groups)
        top = tl.max(tops, 0)
        sums_ptr += (row * tl.num_programs(1) + piece) * 2
        tl.store(sums_ptr, top)
        shift = tl.where(top == -float("inf"), 0.0, top)
        tl.store(sums_ptr + 1, tl.sum(tl.sum(tl.exp(x - shift), 1), 0))

    @triton.jit
    def _merge_sums(sums_ptr, pieces, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The log-sum-exp of a row."""
        piece = tl.arange(0, BLOCK)
        mask = piece < pieces
        tops = tl.load(sums_ptr + piece * 2, mask=mask, other=-float("inf"))
        sums = tl.load(sums_ptr + piece * 2 + 1, mask=mask, other=0.0)
        top = tl.max(tops, 0)
        return top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))

    @triton.jit
    def _merge_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        factor_ptr,
        keys_ptr,
        sums_ptr,
        ids_ptr,
        top_logits_ptr,
        logsumexp_ptr,
        stride_logits_row,
        vocab_size,
        groups,
        pieces,
        COUNT: tl.constexpr,
        CHOSEN: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_LOGITS: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
        BLOCK_PIECES: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        logsumexp = _merge_sums(sums_ptr + row * pieces * 2, pieces, BLOCK_PIECES)
        tl.store(logsumexp_ptr + row, logsumexp)
        group = tl.arange(0, BLOCK_GROUPS)
        keys = tl.load(keys_ptr + row * groups + group, mask=group < groups, other=_SMALLEST_KEY)
        place = tl.arange(0, BLOCK_LOGITS)  # the logits of the chosen groups, side by side
        col = tl.full([BLOCK_LOGITS], 0x7FFFFFFF, tl.int32)
        for i in range(CHOSEN):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, _SMALLEST_KEY, keys)
            first = _key_index(best) // GROUP * GROUP
            col = tl.where(place // GROUP == i, first + place % GROUP, col)
        mask = col < vocab_size
        x = tl.load(logits_ptr + row * stride_logits_row + col, mask=mask, other=0.0)
        x = x.to(tl.float32) * tl.load(factor_ptr + row)
        chosen = tl.where(mask, _sort_key(x, col), _SMALLEST_KEY)
        for i in range(COUNT):
            best = tl.max(chosen, 0)
            tl.store(ids_ptr + row * COUNT + i, _key_index(best).to(tl.int64))
            tl.store(top_logits_ptr + row * COUNT + i, _key_value(best))
            chosen = tl.where(chosen == best, _SMALLEST_KEY, chosen)


def candidates(logits: Tensor, factor: Tensor, count: int) -> Candidates:
    """Find `count` <= V candidates of each row. Rows may lie apart, but must be contiguous."""
    if not uses_triton(logits):
        return reference(logits, factor, count)
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and count <= vocab_size
    device = logits.device
    groups = triton.cdiv(vocab_size, GROUP_SIZE)
    pieces = triton.cdiv(groups, PIECE_GROUPS)
    keys = torch.empty(rows, groups, dtype=torch.int64, device=device)
    sums = torch.empty(rows, pieces, 2, dtype=torch.float32, device=device)
    result = Candidates(
        ids=torch.empty(rows, count, dtype=torch.int64, device=device),
        logits=torch.empty(rows, count, dtype=torch.float32, device=device),
        logsumexp=torch.empty(rows, dtype=torch.float32, device=device),
    )
    _groups_kernel[(rows, pieces)](
        logits,
        factor,
        keys,
        sums,
        logits.stride(0),
        vocab_size,
        groups,
        GROUPS=PIECE_GROUPS,
        GROUP=GROUP_SIZE,
    )
    chosen = min(count, groups)
    _merge_kernel[(rows,)](
        logits,
        factor,
        keys,
        sums,
        *result,
        logits.stride(0),
        vocab_size,
        groups,
        pieces,
        COUNT=count,
        CHOSEN=chosen,
        GROUP=GROUP_SIZE,
        BLOCK_LOGITS=triton.next_power_of_2(chosen) * GROUP_SIZE,
        BLOCK_GROUPS=triton.next_power_of_2(groups),
        BLOCK_PIECES=triton.next_power_of_2(pieces),
    )
    return result

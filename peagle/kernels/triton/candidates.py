"""The M most likely tokens of each row of logits, in descending order, and the row's log-sum-exp.

There are two launches: one over pieces of a row, one over the results of the pieces. Of equal
logits, the kernel takes the first. `factor` multiplies the logits of a row (calibration).

    logits 1 3 2, factor 2, M=2  ->  ids 1 2, logits 6 4, logsumexp 6.14

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

PIECE_SIZE = 512  # logits of one program: a single warp finds their maximum without a barrier


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
    def _pieces_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        factor_ptr,
        keys_ptr,
        sums_ptr,
        stride_logits_row,
        vocab_size,
        pieces,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Store the largest sort keys of a piece, its maximum and its sum of exponentials."""
        row = tl.program_id(0).to(tl.int64)
        piece = tl.program_id(1)
        col = piece * BLOCK + tl.arange(0, BLOCK)
        row_ptr = logits_ptr + row * stride_logits_row
        x = tl.load(row_ptr + col, mask=col < vocab_size, other=-float("inf")).to(tl.float32)
        x = x * tl.load(factor_ptr + row)
        keys = _sort_key(x, col)
        top = tl.max(x, 0)
        tl.store(sums_ptr + (row * pieces + piece) * 2, top)
        tl.store(sums_ptr + (row * pieces + piece) * 2 + 1, tl.sum(tl.exp(x - top), 0))
        out_ptr = keys_ptr + (row * pieces + piece) * COUNT
        for i in range(COUNT):
            best = tl.max(keys, 0)
            tl.store(out_ptr + i, best)
            keys = tl.where(keys == best, _SMALLEST_KEY, keys)

    @triton.jit
    def _merge_kernel(  # type: ignore[no-untyped-def]
        keys_ptr,
        sums_ptr,
        ids_ptr,
        top_logits_ptr,
        logsumexp_ptr,
        pieces,
        COUNT: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        BLOCK_PIECES: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        col = tl.arange(0, BLOCK_KEYS)
        piece = tl.arange(0, BLOCK_PIECES)
        mask = piece < pieces
        tops = tl.load(sums_ptr + (row * pieces + piece) * 2, mask=mask, other=-float("inf"))
        sums = tl.load(sums_ptr + (row * pieces + piece) * 2 + 1, mask=mask, other=0.0)
        top = tl.max(tops, 0)
        tl.store(logsumexp_ptr + row, top + tl.log(tl.sum(sums * tl.exp(tops - top), 0)))
        key_count = pieces * COUNT
        keys = tl.load(keys_ptr + row * key_count + col, mask=col < key_count, other=_SMALLEST_KEY)
        for i in range(COUNT):
            best = tl.max(keys, 0)
            tl.store(ids_ptr + row * COUNT + i, _key_index(best).to(tl.int64))
            tl.store(top_logits_ptr + row * COUNT + i, _key_value(best))
            keys = tl.where(keys == best, _SMALLEST_KEY, keys)


def candidates(logits: Tensor, factor: Tensor, count: int) -> Candidates:
    """Find `count` <= V candidates of each row. Rows may lie apart, but must be contiguous."""
    if not uses_triton(logits):
        return reference(logits, factor, count)
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and count <= min(vocab_size, PIECE_SIZE)
    device = logits.device
    pieces = triton.cdiv(vocab_size, PIECE_SIZE)
    keys = torch.empty(rows, pieces, count, dtype=torch.int64, device=device)
    sums = torch.empty(rows, pieces, 2, dtype=torch.float32, device=device)
    result = Candidates(
        ids=torch.empty(rows, count, dtype=torch.int64, device=device),
        logits=torch.empty(rows, count, dtype=torch.float32, device=device),
        logsumexp=torch.empty(rows, dtype=torch.float32, device=device),
    )
    _pieces_kernel[(rows, pieces)](
        logits,
        factor,
        keys,
        sums,
        logits.stride(0),
        vocab_size,
        pieces,
        COUNT=count,
        BLOCK=PIECE_SIZE,
        num_warps=1,
    )
    block_keys = triton.next_power_of_2(pieces * count)
    _merge_kernel[(rows,)](
        keys,
        sums,
        *result,
        pieces,
        COUNT=count,
        BLOCK_KEYS=block_keys,
        BLOCK_PIECES=triton.next_power_of_2(pieces),
        num_warps=min(max(block_keys // 1024, 1), 8),
    )
    return result

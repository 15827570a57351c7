"""The likeliest tokens of each row of logits, the likeliest first, and the logarithm of all exponentials' sum.

Two launches: over pieces of a row, then over what the pieces found. Of equals the kernel takes the first. `factor`
multiplies a row's logits (calibration), so value - total is a log-probability.

Shapes: logits [T, V], factor [T]. Results: ids [T, M] int64, values [T, M] and totals [T] float32.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

PIECE = 512  # of a row: one warp finds its largest without a barrier


def reference(logits: Tensor, factor: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels compute, in plain PyTorch."""
    x = logits.float() * factor[:, None]
    values, ids = x.topk(count)
    return ids, values, x.logsumexp(-1)


if triton is not None:

    @triton.jit
    def _word(x, at):  # type: ignore[no-untyped-def]
        """A number that grows with x, and among equals falls with the place."""
        bits = x.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)

    @triton.jit
    def _value(word):  # type: ignore[no-untyped-def]
        ordered = (word >> 32).to(tl.int32)
        return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    @triton.jit
    def _place(word):  # type: ignore[no-untyped-def]
        return 0x7FFFFFFF - (word & 0x7FFFFFFF).to(tl.int32)

    @triton.jit
    def _pieces(  # type: ignore[no-untyped-def]
        logits,
        factor,
        words,
        sums,
        row_stride,
        size,
        pieces,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + at, mask=at < size, other=-float("inf")).to(
            tl.float32
        )
        x = x * tl.load(factor + row)
        word = _word(x, at)
        top = tl.max(x, 0)
        tl.store(sums + (row * pieces + piece) * 2, top)
        tl.store(sums + (row * pieces + piece) * 2 + 1, tl.sum(tl.exp(x - top), 0))
        out = words + (row * pieces + piece) * COUNT
        for i in range(COUNT):
            best = tl.max(word, 0)
            tl.store(out + i, best)
            word = tl.where(word == best, -0x7FFFFFFFFFFFFFFF, word)

    @triton.jit
    def _join(  # type: ignore[no-untyped-def]
        words,
        sums,
        ids,
        values,
        totals,
        pieces,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
        PIECES: tl.constexpr,
    ):
        row, at, piece = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PIECES)
        there = piece < pieces
        tops = tl.load(sums + (row * pieces + piece) * 2, mask=there, other=-float("inf"))
        shares = tl.load(sums + (row * pieces + piece) * 2 + 1, mask=there, other=0.0)
        top = tl.max(tops, 0)
        tl.store(totals + row, top + tl.log(tl.sum(shares * tl.exp(tops - top), 0)))
        word = tl.load(
            words + row * pieces * COUNT + at, mask=at < pieces * COUNT, other=-0x7FFFFFFFFFFFFFFF
        )
        for i in range(COUNT):
            best = tl.max(word, 0)
            tl.store(ids + row * COUNT + i, _place(best).to(tl.int64))
            tl.store(values + row * COUNT + i, _value(best))
            word = tl.where(word == best, -0x7FFFFFFFFFFFFFFF, word)


def candidates(logits: Tensor, factor: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, values, totals). Rows of logits may lie apart, their elements may not; `count` is at most V."""
    if triton is None or not (logits.is_cuda or triton.knobs.runtime.interpret):
        return reference(logits, factor, count)
    rows, size = logits.shape
    assert logits.stride(1) == 1 and count <= min(size, PIECE)
    pieces, device = triton.cdiv(size, PIECE), logits.device
    words = torch.empty(rows, pieces, count, dtype=torch.int64, device=device)
    sums = torch.empty(rows, pieces, 2, dtype=torch.float32, device=device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    values = torch.empty(rows, count, dtype=torch.float32, device=device)
    totals = torch.empty(rows, dtype=torch.float32, device=device)
    _pieces[(rows, pieces)](
        logits,
        factor,
        words,
        sums,
        logits.stride(0),
        size,
        pieces,
        COUNT=count,
        BLOCK=PIECE,
        num_warps=1,
    )
    block = triton.next_power_of_2(pieces * count)
    _join[(rows,)](
        words,
        sums,
        ids,
        values,
        totals,
        pieces,
        COUNT=count,
        BLOCK=block,
        PIECES=triton.next_power_of_2(pieces),
        num_warps=min(max(block // 1024, 1), 8),
    )
    return ids, values, totals

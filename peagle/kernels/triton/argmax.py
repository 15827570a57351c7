"""The likeliest token of each row of logits, and how likely it is: two launches, the first over pieces of a row.

A row that holds a NaN has +inf as its best: so one look at the result tells a broken row. The first of equals counts.

Shapes: logits [T, V]. Results: ids [T] int64, tops [T] float32.
"""

import torch
from torch import Tensor

from peagle.kernels.cpu import ops

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

PIECE = 4096  # of a row


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels compute, in plain PyTorch."""
    tops, ids = logits.max(-1)  # a NaN is the largest of all
    return ids, marked(tops)


def marked(tops: Tensor) -> Tensor:
    """Of a NaN, +inf."""
    return tops.float().nan_to_num(float("inf"), float("inf"), float("-inf"))


if triton is not None:

    @triton.jit
    def _pieces(logits, tops, ids, row_stride, size, pieces, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + at, mask=at < size, other=-float("inf")).to(
            tl.float32
        )
        x = tl.where(x == x, x, float("inf"))
        top, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(tops + row * pieces + piece, top)
        tl.store(ids + row * pieces + piece, piece * BLOCK + place)

    @triton.jit
    def _join(tops, ids, best, token, pieces, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        x = tl.load(tops + row * pieces + at, mask=at < pieces, other=-float("inf"))
        top, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + row, top)
        tl.store(token + row, tl.load(ids + row * pieces + place).to(tl.int64))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, tops); rows may lie apart, their elements may not."""
    if triton is None or not (logits.is_cuda or triton.knobs.runtime.interpret):
        found = ops.argmax(logits)
        return (
            reference(logits)
            if found is None
            else (found, marked(logits.gather(1, found[:, None])[:, 0]))
        )
    rows, size = logits.shape
    assert logits.stride(1) == 1
    pieces = triton.cdiv(size, PIECE)
    tops = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    top = torch.empty(rows, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _pieces[(rows, pieces)](logits, tops, ids, logits.stride(0), size, pieces, BLOCK=PIECE)
    _join[(rows,)](tops, ids, top, token, pieces, BLOCK=triton.next_power_of_2(pieces), num_warps=1)
    return token, top

"""Top-p sampling: remove the least likely tokens, as long as they have at most 1 - p together.

    probabilities .1 .5 .1 .3, p .85   ->  token 0 is removed, token 2 stays

Of equal logits, those in front are removed first; the most likely token stays. Probabilities are
added as integers, in units of 2^-40 of the largest one: sums have no order, so the result of a row
depends on nothing but the row.

A sort of the whole vocabulary would take most of a step. Instead a program searches the largest
logit below which all are removed: it divides the range of logits by four, and sums the tokens below
the three limits, again and again. The logits of a row stay in the cache meanwhile.

Shapes: logits [T, V] float32, tails [T] float64: 1 - p of each row. Result: logits [T, V], removed
ones -inf.
"""

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

TOP_UNITS = 2.0**40  # the probability of the most likely token, in units
PIECE_SIZE = 4096
SEARCH_ROUNDS = 17  # that reduce 2^32 logits to one


def reference(logits: Tensor, tails: Tensor) -> Tensor:
    """The same computation in plain PyTorch, for logits [..., V] and tails [...]."""
    highest = logits.amax(-1, keepdim=True)
    units = ((logits - highest).exp() * TOP_UNITS).long()
    total = units.sum(-1, keepdim=True)
    limit = (tails[..., None] * total).long().minimum(total - 1)
    index = logits.sort(stable=True).indices
    removed = units.gather(-1, index).cumsum_(-1) <= limit
    return logits.masked_fill(removed.scatter(-1, index, removed), -torch.inf)


if triton is not None:
    _TOP_UNITS = tl.constexpr(TOP_UNITS)

    @triton.jit
    def _load_piece(row_ptr, start, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        col = start + tl.arange(0, BLOCK)
        return tl.load(row_ptr + col, mask=col < vocab_size, other=-float("inf"))

    @triton.jit
    def _ordered(x):  # type: ignore[no-untyped-def]
        """Integers in the order of the numbers."""
        bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)

    @triton.jit
    def _units(x, highest):  # type: ignore[no-untyped-def]
        return (tl.exp(x - highest) * _TOP_UNITS).to(tl.int64)

    @triton.jit
    def _top_p_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        tails_ptr,
        out_ptr,
        stride_row,
        vocab_size,
        ROUNDS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        row_ptr = logits_ptr + row * stride_row
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            top = tl.maximum(top, _load_piece(row_ptr, start, vocab_size, BLOCK))
        highest = tl.max(top, 0)
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            sums += _units(_load_piece(row_ptr, start, vocab_size, BLOCK), highest)
        total = tl.sum(sums, 0)
        limit = (tl.load(tails_ptr + row) * total.to(tl.float64)).to(tl.int64)
        limit = tl.minimum(limit, total - 1)
        # The tokens up to `low` have at most `limit` together, those up to `high` have more.
        low = tl.full([], -0x80000001, tl.int64)
        high = _ordered(highest)
        low_sum = tl.zeros([], tl.int64)
        for _ in range(ROUNDS):
            width = high - low
            first = low + width // 4
            second = low + width // 2
            third = low + width * 3 // 4
            first_sums = tl.zeros([BLOCK], tl.int64)
            second_sums = tl.zeros([BLOCK], tl.int64)
            third_sums = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab_size, BLOCK):
                x = _load_piece(row_ptr, start, vocab_size, BLOCK)
                key = _ordered(x)
                units = _units(x, highest)
                first_sums += tl.where(key <= first, units, 0)
                second_sums += tl.where(key <= second, units, 0)
                third_sums += tl.where(key <= third, units, 0)
            first_sum = tl.sum(first_sums, 0)
            second_sum = tl.sum(second_sums, 0)
            third_sum = tl.sum(third_sums, 0)
            if first_sum > limit:
                high = first
            elif second_sum > limit:
                low = first
                low_sum = first_sum
                high = second
            elif third_sum > limit:
                low = second
                low_sum = second_sum
                high = third
            else:
                low = third
                low_sum = third_sum
        # Of the tokens whose logit is `high`, the first ones are removed too.
        equal = tl.zeros([], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            x = _load_piece(row_ptr, start, vocab_size, BLOCK)
            key = _ordered(x)
            is_equal = (key == high).to(tl.int64)
            rank = equal + tl.cumsum(is_equal, 0)
            removed = (key < high) | (
                (key == high) & (low_sum + rank * _units(x, highest) <= limit)
            )
            equal += tl.sum(is_equal, 0)
            col = start + tl.arange(0, BLOCK)
            out = tl.where(removed, -float("inf"), x)
            tl.store(out_ptr + row * vocab_size + col, out, mask=col < vocab_size)


def top_p(logits: Tensor, tails: Tensor) -> Tensor:
    """Logits with removed ones. Rows may lie apart, but must be contiguous."""
    if not uses_triton(logits):
        return reference(logits, tails)
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert tails.shape == (rows,) and tails.dtype == torch.float64
    out = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    _top_p_kernel[(rows,)](
        logits,
        tails.contiguous(),
        out,
        logits.stride(0),
        vocab_size,
        ROUNDS=SEARCH_ROUNDS,
        BLOCK=min(PIECE_SIZE, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return out

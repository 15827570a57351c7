"""Draw a token of each row: the inverse of its cumulative distribution at a uniform number.

    probabilities .2 .5 .3, uniform .6   ->  cumulative .2 .7 1.  ->  token 1

Probabilities are added as integers, in units of 2^-52: their sums are the same in any order, so the
token of a row depends on nothing but the row. The cumulative distribution of a whole vocabulary is
never stored. There are two launches: one sums pieces of a row, one finds the piece that the number
falls into, and the token in it.

Shapes: probabilities [T, V] float32, uniforms [T] float64 in [0, 1). Result: ids [T] int64.
"""

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

CDF_UNITS = 2.0**52  # float64 holds every sum of probabilities in these units
PIECE_SIZE = 4096  # probabilities of one program


def cumulative_units(probabilities: Tensor) -> Tensor:
    """The cumulative distribution of each row [..., V], in units of 1 / CDF_UNITS."""
    return (probabilities * CDF_UNITS).long().cumsum_(-1)


def reference(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The same computation in plain PyTorch."""
    cdf = cumulative_units(probabilities)
    threshold = (uniforms[:, None] * cdf[:, -1:]).long()
    found = torch.searchsorted(cdf, threshold, right=True)[:, 0]
    return found.clamp(max=probabilities.shape[1] - 1)


if triton is not None:
    _CDF_UNITS = tl.constexpr(CDF_UNITS)

    @triton.jit
    def _load_units(row_ptr, first, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The probabilities of a piece of a row as integers."""
        col = first + tl.arange(0, BLOCK)
        p = tl.load(row_ptr + col, mask=col < vocab_size, other=0.0)
        return (p * _CDF_UNITS).to(tl.int64)

    @triton.jit
    def _piece_sums_kernel(  # type: ignore[no-untyped-def]
        p_ptr, sums_ptr, stride_row, vocab_size, pieces, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        piece = tl.program_id(1)
        units = _load_units(p_ptr + row * stride_row, piece * BLOCK, vocab_size, BLOCK)
        tl.store(sums_ptr + row * pieces + piece, tl.sum(units, 0))

    @triton.jit
    def _find_kernel(  # type: ignore[no-untyped-def]
        p_ptr,
        sums_ptr,
        uniforms_ptr,
        ids_ptr,
        stride_row,
        vocab_size,
        pieces,
        PIECES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        piece_index = tl.arange(0, PIECES)
        sums = tl.load(sums_ptr + row * pieces + piece_index, mask=piece_index < pieces, other=0)
        total = tl.sum(sums, 0)
        threshold = (tl.load(uniforms_ptr + row) * total.to(tl.float64)).to(tl.int64)
        passed = (tl.cumsum(sums, 0) <= threshold) & (piece_index < pieces)
        piece = tl.minimum(tl.sum(passed.to(tl.int32), 0), pieces - 1)
        before = tl.sum(tl.where(piece_index < piece, sums, 0), 0)
        units = _load_units(p_ptr + row * stride_row, piece * BLOCK, vocab_size, BLOCK)
        passed = before + tl.cumsum(units, 0) <= threshold
        token = piece * BLOCK + tl.sum(passed.to(tl.int32), 0)
        tl.store(ids_ptr + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


def draw_tokens(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """ids. Rows may lie apart, but must be contiguous."""
    if not uses_triton(probabilities):
        return reference(probabilities, uniforms)
    rows, vocab_size = probabilities.shape
    assert probabilities.stride(1) == 1 and probabilities.dtype == torch.float32
    assert uniforms.shape == (rows,) and uniforms.dtype == torch.float64
    pieces = triton.cdiv(vocab_size, PIECE_SIZE)
    sums = torch.empty(rows, pieces, dtype=torch.int64, device=probabilities.device)
    ids = torch.empty(rows, dtype=torch.int64, device=probabilities.device)
    stride_row = probabilities.stride(0)
    _piece_sums_kernel[(rows, pieces)](
        probabilities, sums, stride_row, vocab_size, pieces, BLOCK=PIECE_SIZE
    )
    _find_kernel[(rows,)](
        probabilities,
        sums,
        uniforms.contiguous(),
        ids,
        stride_row,
        vocab_size,
        pieces,
        PIECES=triton.next_power_of_2(pieces),
        BLOCK=PIECE_SIZE,
        num_warps=8,
    )
    return ids

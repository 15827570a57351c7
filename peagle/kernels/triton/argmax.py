"""The most likely token of each row of logits, and its logit.

There are two launches: one over pieces of a row, one over the results of the pieces. A row that
holds a NaN gets +inf as its top logit, so that the result alone tells a broken row. Of equal
logits, the first counts.

    logits 1 5 5     ->  id 1, top logit 5
    logits 1 NaN 5   ->  id 1, top logit inf

Shapes: logits [T, V]. Results: ids [T] int64, top_logits [T] float32.
"""

import torch
from torch import Tensor

from peagle.kernels.cpu import ops
from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

PIECE_SIZE = 4096  # logits of one program


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same computation in plain PyTorch, for which a NaN is the largest number."""
    top_logits, ids = logits.max(-1)
    return ids, nan_to_inf(top_logits)


def nan_to_inf(top_logits: Tensor) -> Tensor:
    return top_logits.float().nan_to_num(float("inf"), float("inf"), float("-inf"))


if triton is not None:

    @triton.jit
    def _pieces_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, tops_ptr, ids_ptr, stride_row, vocab_size, pieces, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        piece = tl.program_id(1)
        col = piece * BLOCK + tl.arange(0, BLOCK)
        row_ptr = logits_ptr + row * stride_row
        x = tl.load(row_ptr + col, mask=col < vocab_size, other=-float("inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        top, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(tops_ptr + row * pieces + piece, top)
        tl.store(ids_ptr + row * pieces + piece, piece * BLOCK + index)

    @triton.jit
    def _merge_kernel(  # type: ignore[no-untyped-def]
        tops_ptr, ids_ptr, top_out_ptr, id_out_ptr, pieces, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        piece = tl.arange(0, BLOCK)
        x = tl.load(tops_ptr + row * pieces + piece, mask=piece < pieces, other=-float("inf"))
        top, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(top_out_ptr + row, top)
        tl.store(id_out_ptr + row, tl.load(ids_ptr + row * pieces + index).to(tl.int64))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, top_logits). Rows may lie apart, but must be contiguous."""
    if not uses_triton(logits):
        ids = ops.argmax(logits)
        if ids is None:
            return reference(logits)
        return ids, nan_to_inf(logits.gather(1, ids[:, None])[:, 0])
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    pieces = triton.cdiv(vocab_size, PIECE_SIZE)
    piece_tops = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    piece_ids = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    top_logits = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _pieces_kernel[(rows, pieces)](
        logits, piece_tops, piece_ids, logits.stride(0), vocab_size, pieces, BLOCK=PIECE_SIZE
    )
    _merge_kernel[(rows,)](
        piece_tops,
        piece_ids,
        top_logits,
        ids,
        pieces,
        BLOCK=triton.next_power_of_2(pieces),
        num_warps=1,
    )
    return ids, top_logits

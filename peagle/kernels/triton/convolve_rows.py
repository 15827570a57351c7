"""What the convolution of a block adds to its mask rows, in one launch: a program computes one row.

    added_t = (base + groups_t) * h_{t-1}   for a mask row t; 0 for any other row

`groups` has one factor for each group of 16 channels (drafter/convolution.py). The row before a
mask row is the row in front of it in memory: a request's mask rows follow the row of its newest
token.

Shapes: hidden [T, d], groups [T, ceil(d / 16)], base [d], is_mask [T, 1]. Result: [T, d].
"""

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

CHANNELS_PER_GROUP = 16


def reference(hidden: Tensor, groups: Tensor, base: Tensor, is_mask: Tensor) -> Tensor:
    """The same computation in plain PyTorch."""
    spread = groups.float().repeat_interleave(CHANNELS_PER_GROUP, 1)[:, : hidden.shape[1]]
    added = (base.float() + spread) * hidden.roll(1, 0).float()
    return torch.where(is_mask, added, 0.0).to(hidden.dtype)


if triton is not None:

    @triton.jit
    def _convolve_rows_kernel(  # type: ignore[no-untyped-def]
        hidden_ptr,
        groups_ptr,
        base_ptr,
        is_mask_ptr,
        out_ptr,
        stride_hidden_row,
        stride_groups_row,
        D: tl.constexpr,
        BLOCK_D: tl.constexpr,
        PER_GROUP: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        dims = tl.arange(0, BLOCK_D)
        mask = dims < D
        # Row 0 has no row in front of it, and is never a mask row.
        adds = tl.load(is_mask_ptr + row).to(tl.int1) & (row > 0)
        base = tl.load(base_ptr + dims, mask=mask & adds, other=0.0).to(tl.float32)
        groups_row_ptr = groups_ptr + row * stride_groups_row
        factors = tl.load(groups_row_ptr + dims // PER_GROUP, mask=mask & adds, other=0.0)
        before_ptr = hidden_ptr + (row - 1) * stride_hidden_row
        before = tl.load(before_ptr + dims, mask=mask & adds, other=0.0).to(tl.float32)
        added = (base + factors.to(tl.float32)) * before
        tl.store(out_ptr + row * D + dims, added.to(out_ptr.dtype.element_ty), mask=mask)


def convolve_rows(hidden: Tensor, groups: Tensor, base: Tensor, is_mask: Tensor) -> Tensor:
    if not uses_triton(hidden):
        return reference(hidden, groups, base, is_mask)
    rows, d = hidden.shape
    assert hidden.stride(1) == groups.stride(1) == base.stride(0) == 1
    assert groups.shape == (rows, -(-d // CHANNELS_PER_GROUP)) and is_mask.shape == (rows, 1)
    out = torch.empty(rows, d, dtype=hidden.dtype, device=hidden.device)
    if rows:
        _convolve_rows_kernel[(rows,)](
            hidden,
            groups,
            base,
            is_mask,
            out,
            hidden.stride(0),
            groups.stride(0),
            D=d,
            BLOCK_D=triton.next_power_of_2(d),
            PER_GROUP=CHANNELS_PER_GROUP,
        )
    return out

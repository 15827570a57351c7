"""A gated convolution of two taps along the rows of a block.

Behind every layer, a mask row adds the state of the row before it, channel by channel:

    h_t' = h_t + (base + gate(h_t / rms(h_t))) * h_{t-1}

`base` has a factor for each channel. `gate` is a linear map from the row's own state to one factor
for each group of 16 channels (DFlash 2 has such convolutions around attention and MLP). The row
before the first mask row is that of the newest token, whose inputs are real. Rows with real inputs
are not changed, so the keys and values of the context do not depend on the blocks, and no state has
to be kept from step to step.

In the engine one launch computes what is added; a program computes one row (`convolve_rows`). The
row before a mask row is then the row in front of it in memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from peagle.drafter.linear import Linear
from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

CHANNELS_PER_GROUP = 16
GATE_EPS = 1e-6

# (layer, its output [R, d]) -> the output of the row before each mask row, zero for other rows,
# [R, d]; None: there are no mask rows
PreviousRows = Callable[[int, Tensor], Tensor | None]


class RowConvolution(nn.Module):
    """The convolution behind one layer; it starts without effect."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(d))
        self.gate = Linear(d, -(-d // CHANNELS_PER_GROUP), bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden, previous [R, d] -> what is added to hidden, [R, d]."""
        normed = rms_norm(hidden, hidden.shape[-1:], eps=GATE_EPS)
        groups = self.gate(normed).repeat_interleave(CHANNELS_PER_GROUP, -1)
        factors = self.base + groups[:, : hidden.shape[-1]]
        return (factors * previous).to(hidden.dtype)


def rows_before(mask_rows: int) -> PreviousRows:
    """For rows of one request, in order, of which the last `mask_rows` are its mask rows."""

    def previous(layer: int, hidden: Tensor) -> Tensor:
        rows = torch.zeros_like(hidden)
        first = len(hidden) - mask_rows
        rows[first:] = hidden[first - 1 : -1]
        return rows

    return previous


def reference(hidden: Tensor, groups: Tensor, base: Tensor, is_mask: Tensor) -> Tensor:
    """`convolve_rows` in plain PyTorch."""
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
    """What is added to the rows hidden [T, d]: (base + groups) * the row before, for mask rows.

    groups [T, ceil(d / 16)] are the outputs of the gate, base [d], is_mask [T, 1].
    """
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

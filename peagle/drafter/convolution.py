"""A gated convolution of two taps along the rows of a block.

Behind every layer, a mask row adds the state of the row before it, channel by channel:

    h_t' = h_t + (base + gate(h_t / rms(h_t))) * h_{t-1}

`base` has a factor for each channel. `gate` is a linear map from the row's own state to one factor
for each group of 16 channels (DFlash 2 has such convolutions around attention and MLP). The row
before the first mask row is that of the newest token, whose inputs are real. Rows with real inputs
are not changed, so the keys and values of the context do not depend on the blocks, and no state has
to be kept from step to step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from peagle.drafter.linear import Linear
from peagle.kernels.triton.convolve_rows import CHANNELS_PER_GROUP

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

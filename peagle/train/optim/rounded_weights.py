"""Training for 4 bits: passes use rounded weights, the optimizer changes the exact ones.

A gradient is that of the rounded weights (a straight-through estimate), so that a drafter learns
to draft with the weights that are going to be stored. The scales of the groups are found again
every SCALE_STEPS steps; between them a weight may only change its code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.drafter.formats import int4
from peagle.drafter.formats.row_format import INT4, RowFormat

SCALE_STEPS = 50


class RoundedWeights:
    def __init__(self, drafter: Drafter, rows: RowFormat = INT4) -> None:
        self.rows = rows
        self.matrices: list[Tensor] = [
            matrix for name, matrix in drafter.named_parameters() if rows.is_four_bit(name, matrix)
        ]
        self.scales = list[Tensor]()  # of each matrix; the state of a run has them

    @torch.no_grad()
    def _round(self, step: int) -> None:
        if not self.scales or step % SCALE_STEPS == 0:
            self.scales = [int4.stored_scales(m, self.rows.group) for m in self.matrices]
        for matrix, scales in zip(self.matrices, self.scales, strict=True):
            matrix.copy_(int4.rounded(matrix, scales))

    @contextmanager
    def in_use(self, step: int) -> Iterator[None]:
        """Passes inside use rounded weights; gradients stay."""
        exact = [matrix.detach().clone() for matrix in self.matrices]
        self._round(step)
        try:
            yield
        finally:
            with torch.no_grad():
                for matrix, values in zip(self.matrices, exact, strict=True):
                    matrix.copy_(values)

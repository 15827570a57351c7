"""The loss of the confidence output.

It predicts whether a row's draft is the teacher's most likely token, given that the drafts before
it were.

Rows behind a wrong draft tell nothing about that and do not count. The gradient ends at the
confidence output: the drafter itself does not learn to be predictable.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from peagle.train.objective.loss import LossOutput, rows_reached
from peagle.train.objective.passes import DrafterPasses


class ConfidenceRows(NamedTuple):
    normed: Tensor  # [R, d]
    anchor: Tensor  # [R]
    depth: Tensor  # [R]
    log_probs: Tensor  # [R] of the row's own most likely token
    matches: Tensor  # [R] 1 where that token is the teacher's, else 0


class ConfidenceLoss:
    """The rows of one pack; without a confidence output nothing is collected."""

    def __init__(self, passes: DrafterPasses) -> None:
        self.passes = passes
        self.enabled = passes.drafter.confidence is not None
        self.rows: list[ConfidenceRows] = []

    def add_rows(self, normed: Tensor, anchor: Tensor, depth: Tensor, output: LossOutput) -> None:
        """Collect rows with their losses."""
        if self.enabled:
            self.rows.append(
                ConfidenceRows(normed, anchor, depth, output.log_probs, output.matches)
            )

    def backward(self, tokens: int, k: int, scale: float) -> None:
        """Add the gradients of the confidence output; the pack has `tokens` tokens and k depths."""
        if not self.enabled:
            return
        rows = ConfidenceRows(*(torch.cat(part) for part in zip(*self.rows, strict=True)))
        reached = rows_reached(rows.matches, rows.anchor, rows.depth, tokens, k)
        logits = self.passes("confidence_logits", rows.normed, rows.log_probs)
        loss = binary_cross_entropy_with_logits(logits, rows.matches, reached, reduction="sum")
        (scale * loss).backward()

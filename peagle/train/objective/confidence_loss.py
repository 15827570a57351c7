"""What the confidence output learns from: is a row's draft the teacher's best token, given that those before it were?

Rows behind a wrong draft say nothing of that, and do not count. The gradient ends at the output: the drafter does not
learn to be easily judged.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from peagle.train.objective.loss import Loss
from peagle.train.objective.passes import Passes


class ConfidenceLoss:
    """The rows of one pack."""

    def __init__(self, passes: Passes) -> None:
        self.passes, self.wanted = passes, passes.drafter.confidence is not None
        self.rows: list[tuple[Tensor, ...]] = []

    def see(self, normed: Tensor, anchor: Tensor, depth: Tensor, loss: Loss) -> None:
        """Rows whose loss has just been computed."""
        if self.wanted:
            self.rows.append((normed, anchor, depth, loss.sure, loss.matched))

    def learn(self, tokens: int, k: int, scale: float) -> None:
        """Adds the gradients of the confidence output; the pack has so many tokens, the chains so many depths."""
        if not self.wanted:
            return
        normed, anchor, depth, sure, matched = (
            torch.cat(part) for part in zip(*self.rows, strict=True)
        )
        right = torch.zeros(tokens, k + 1, device=normed.device)
        right[:, 0] = 1
        right[anchor, depth + 1] = matched
        reached = right.cumprod(1)[anchor, depth]  # all before it were right
        said = self.passes("judge", normed, sure)
        (
            scale * binary_cross_entropy_with_logits(said, matched, reached, reduction="sum")
        ).backward()

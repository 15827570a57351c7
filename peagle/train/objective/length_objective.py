"""The acceptance length as an objective: what a row adds to the length that its chain is accepted for.

Of an anchor's chain, q_i being how likely row i drafts the teacher's best token, the expected number of accepted drafts
and its gradient are

    E = q_0 + q_0 q_1 + q_0 q_1 q_2 + ...        dE / d log q_i = sum over k >= i of q_0 ... q_k

so that `length` is cross-entropy, each row weighted by (1 - m) + m * that sum: the gradient of (1 - m) * ce - m * E.
Where nothing is drafted well yet the sums are small and plain cross-entropy remains. A chain is as long as it was
sampled (chains.py); an anchor without one has its depth 0 alone.
"""

import torch
from torch import Tensor

from peagle.train.objective.loss import Loss, Teacher


class LengthObjective:
    """Of one pack: q of every row that was seen, by anchor and depth."""

    def __init__(self, loss: Loss, tokens: int, device: torch.device) -> None:
        self.loss = loss
        self.q = (
            torch.zeros(tokens, loss.k, device=device) if loss.length else None
        )  # 0: no such row

    def see(self, normed: Tensor, teacher: Teacher, anchor: Tensor, depth: Tensor) -> None:
        if self.q is not None:
            self.q[anchor, depth] = self.loss.chances(normed, teacher)

    def weights(self, anchor: Tensor, depth: Tensor) -> Tensor | float:
        """[R] of these rows, all rows of their chains having been seen; 1 where another loss is minimized."""
        if self.q is None:
            return 1.0
        reached = self.q.cumprod(1)
        onwards = reached.flip(1).cumsum(1).flip(1)[anchor, depth]
        return 1 - self.loss.length + self.loss.length * onwards

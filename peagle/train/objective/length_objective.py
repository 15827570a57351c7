"""The acceptance length as an objective: what a row adds to the accepted length of its chain.

Let q_i be the probability that row i of an anchor's chain drafts the teacher's most likely token.
The expected number of accepted drafts and its gradient are

    E = q_0 + q_0 q_1 + q_0 q_1 q_2 + ...        dE / d log q_i = sum over k >= i of q_0 ... q_k

so `length` is cross-entropy in which each row is weighted by (1 - m) + m * that sum: the gradient
of (1 - m) * ce - m * E. While drafts are still bad the sums are small and plain cross-entropy
remains. A chain is as long as it was sampled (chains.py); an anchor without a chain has its depth 0
alone.

`dpace` (arXiv 2605.18810) is cross-entropy weighted by the same sum of smoothed probabilities,
(1 - m) q_i + m: deeper rows keep some weight where the first drafts are bad.

`tree` is the same for a tree (draft_shape.py), which keeps the paths of the highest probability.
The teacher's tokens are accepted up to depth k if their path is kept: if L_k = log (q_0 ... q_k) is
above the log-probability t of the least likely node. With s(x) = 1 / (1 + exp(-x)) as a soft step,

    E = sum over k of s((L_k - t) / w)
    dE / d log q_i = sum over k >= i of s'((L_k - t) / w) / w

so the weight is on the rows of paths that are about to enter or to leave the tree, not on those
that are in it anyway. t and w are constants: t hardly differs from anchor to anchor.
"""

import torch
from torch import Tensor

from peagle.train.features.teacher import Teacher
from peagle.train.objective.loss import Loss

# Log-probability of the least likely node of a tree. Trees of 31 nodes of the shipped P-EAGLE head
# have -4.0 in the median, quartiles -4.4 and -3.8 (benchmarks/drafter/anchors.py, 446 trees, K=7).
TREE_THRESHOLD = -4.0
TREE_WIDTH = 1.0  # of the soft step, in log-probabilities


class LengthObjective:
    """The weights of the rows of one pack; 1 for every other loss."""

    def __init__(self, loss: Loss, tokens: int, device: torch.device) -> None:
        self.loss = loss
        # [T, K] q, smoothed for dpace, by anchor and depth; 0 where there is no such row
        self.q = torch.zeros(tokens, loss.k, device=device) if loss.length_share else None
        self.anchor_weights: Tensor | None = None  # [T]; see on_policy.py

    def add_rows(self, normed: Tensor, teacher: Teacher, anchor: Tensor, depth: Tensor) -> None:
        if self.q is not None:
            q = self.loss.teacher_token_probs(normed, teacher)
            self.q[anchor, depth] = torch.lerp(q, torch.ones_like(q), self.loss.smoothing)

    def weights(self, anchor: Tensor, depth: Tensor) -> Tensor | float:
        """The weights of these rows, [R]. All rows of their chains must have been added."""
        anchor_weights = 1.0 if self.anchor_weights is None else self.anchor_weights[anchor]
        if self.q is None:
            return anchor_weights
        gain = tree_gain(self.q) if self.loss.tree else self.q.cumprod(1)
        remaining = gain.flip(1).cumsum(1).flip(1)[anchor, depth]
        share = self.loss.length_share
        return (1 - share + share * remaining) * anchor_weights


def tree_gain(q: Tensor) -> Tensor:
    """dE / dL_k of the expected accepted length of a tree, [T, K]."""
    kept = torch.sigmoid((q.log().cumsum(1) - TREE_THRESHOLD) / TREE_WIDTH)
    return kept * (1 - kept) / TREE_WIDTH

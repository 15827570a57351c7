"""Anchors by the drafter's own mistakes: where decoding with the current drafter starts a step.

Decoding drafts only at some anchors. After a step with m accepted drafts, the newest token is the
target's own token behind them: one that was drafted wrong, or not drafted at all. Training with the
same weight for every anchor learns as much from anchors whose newest token is easy, which decoding
jumps over (Draft-OPD, arXiv 2605.29343, drafts again from such errors).

Anchor a has the newest token a + 1, which the depth-0 row of anchor a - 1 drafts with the most
knowledge of all rows. Where that row was wrong, decoding with the shipped P-EAGLE head (K = 7)
started a step at 88 % of the anchors, elsewhere at 13 % (benchmarks/drafter/anchors.py, 3,459
anchors of SmolLM2-135M): a share s of 0.8 nearly gives the anchors the weights with which decoding
visits them. Anchors behind a right row have the weight 1 - s, all others 1, divided by the mean:

    answer x2..x7, depth-0 row 2 is wrong about x4:  anchors 1 (behind the prompt) and 3 (newest
    token x4) have the weight 1, the anchors 2, 4 and 5 the weight 1 - s

Rows of all depths of an anchor have its weight. The first token of an answer is not drafted, so its
anchor always counts.
"""

import torch
from torch import Tensor


def landing_weights(share: float, rows: Tensor, matches: Tensor, tokens: int) -> Tensor:
    """The weights of the anchors, [T], with a mean of 1 over the supervised rows.

    rows [n]: the supervised rows of depth 0; matches [n]: 1 where such a row drafts right, else 0.
    """
    weights = torch.ones(tokens + 1, device=matches.device)
    weights[rows.long() + 1] -= share * matches
    return weights[:tokens] / weights[rows.long()].mean().clamp(min=1e-6)

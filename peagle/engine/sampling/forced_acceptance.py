"""Forced acceptance: drafts are accepted with given probabilities, for measurements of speed.

A chain accepts draft i with the probability of its depth, given those before it. A tree accepts
the path that the target's tokens take, so these are drawn by a model of a trained drafter. At each
depth, the token of the target is

    the best candidate        with the drafter's confidence p
    candidate r = 2, 3, ..    with (1 - p) times the share of rank r
    none of the candidates    else

The confidence of a depth is drawn anew for each draft, from a Beta distribution whose mean is the
probability of the chain: a drafter is sure of some tokens and unsure of others, and a tree goes
deep where it is sure and wide where it is not. The model replaces the log-probabilities of the
candidates, so the tree is what the kernel builds for such a drafter (kernels/triton/build_tree.py);
random weights would give a tree without depth. What the tree does not hold is not accepted: a
smaller tree, or the chain of the same draft, accepts less. Nothing is accepted at depths behind the
last probability.

Confidences of different depths are independent, so the chain of such a draft accepts as given. On
60 tasks, trees of the head below accept 3 % more or less than this model on average, at most
6 % more (docs/moe.md#trees).

All of it runs on the device, inside the CUDA graphs of a step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.kernels.triton.build_tree import DraftTrees, tree_topology

# Where the best candidate is not the target's token: the shares of ranks 2, 3, .. 16, in descending
# order; the rest is no candidate. Both constants are those of the 8-bit head of SmolLM2-135M:
#     python -m benchmarks.drafter.ranks DATA --limit 20
RANK_SHARES = (
    *(0.339, 0.149, 0.063, 0.041, 0.031),
    *(0.017, 0.014, 0.013, 0.009, 0.006),
    *(0.005, 0.005, 0.002, 0.001, 0.0),
)
# The sum of the Beta distribution's parameters: the smaller, the closer confidences are to 0 and 1.
CONFIDENCE_CONCENTRATION = 1.5
CONFIDENCE_DRAWS = 1 << 14  # of each depth, drawn once on the host


class ForcedAcceptance:
    def __init__(self, probabilities: Sequence[float], trees: DraftTrees, vocab_size: int) -> None:
        """`probabilities`: of each depth, given the depths before it; `trees`: those of all slots.

        CUDA graphs that were captured before do not see it.
        """
        slots, max_k = trees.chain.shape
        device = trees.chain.device
        padded = [*probabilities, *[0.0] * max_k][:max_k]
        self.trees = trees
        self.vocab_size = vocab_size  # of the target
        self.probabilities = torch.tensor(padded, device=device)  # [K]
        likely = rank_probabilities(draw_confidences(padded), torch.tensor(RANK_SHARES))
        # [draws, K, M]
        self.logp = log_probabilities(likely).to(device)
        self.cumulative = likely.cumsum(-1).to(device)
        self.depths = torch.arange(max_k, device=device)
        # The target's token at each depth of the tree that was drafted last, by slot.
        self.tokens = torch.zeros(slots, max_k, dtype=torch.long, device=device)

    def draw(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Draw the target's tokens behind a tree; returns logp [B, K, 1, M] of its candidates.

        ids [B, K, M]: the candidates, in the target's vocabulary, best first; slots [B].
        """
        batch, k, count = ids.shape
        drawn = torch.randint(len(self.logp), (batch, k), device=ids.device)
        drawn_rows = (drawn, self.depths[:k])
        uniform = torch.rand(batch, k, 1, device=ids.device)
        limits = self.cumulative[drawn_rows][..., :count]
        rank = (uniform >= limits).sum(-1, keepdim=True)  # `count`: no candidate
        # No candidate; behind the end of the vocabulary token 0, which hardly ever is one.
        other = (ids.amax(-1, keepdim=True) + 1) % self.vocab_size
        self.tokens[slots, :k] = torch.cat([ids, other], -1).gather(-1, rank)[..., 0]
        return self.logp[drawn_rows][..., :count].contiguous()[:, :, None]

    def apply(self, tokens: Tensor, ids: Tensor, shape: DraftShape, index: Tensor) -> None:
        """Overwrite the target's tokens behind the rows of a draft; tokens and ids [B, R].

        index [B]: the slots.
        """
        if shape.is_chain:
            force_chain(tokens, ids[:, 1:], self.probabilities, self.vocab_size)
            return
        depths = self.trees.depths[index, : shape.nodes].long()
        depths = torch.cat([torch.zeros_like(depths[:, :1]), depths], 1)  # of each row
        drawn = self.tokens[index].gather(1, depths.clamp(max=self.tokens.shape[1] - 1))
        # Behind the last depth, the target's own token stays.
        tokens.copy_(torch.where(depths < self.tokens.shape[1], drawn, tokens))


def force_chain(tokens: Tensor, drafts: Tensor, probabilities: Tensor, vocab_size: int) -> None:
    """Overwrite the target's tokens so that draft i of a chain is accepted with probability i."""
    accept = torch.rand(drafts.shape, device=drafts.device) < probabilities[: drafts.shape[1]]
    tokens[:, :-1] = torch.where(accept, drafts, (drafts + 1) % vocab_size)


def draw_confidences(
    probabilities: Sequence[float], concentration: float = CONFIDENCE_CONCENTRATION
) -> Tensor:
    """[draws, K]: a drafter's confidence in the best candidate, with these means."""
    mean = np.asarray(probabilities)
    inside = np.clip(mean, 1e-6, 1 - 1e-6)
    rng = np.random.default_rng(0)
    size = (CONFIDENCE_DRAWS, len(mean))
    drawn = rng.beta(concentration * inside, concentration * (1 - inside), size)
    return torch.from_numpy(np.where(mean == inside, drawn, mean)).float()


def rank_probabilities(confidence: Tensor, shares: Tensor) -> Tensor:
    """[.., K] -> [.., K, M]: how likely each candidate is the target's token.

    No candidate is more likely than the best one.
    """
    best = confidence[..., None]
    return torch.cat([best, torch.minimum((1 - best) * shares, best)], -1)


def log_probabilities(likely: Tensor) -> Tensor:
    """Finite ones, as trees need them."""
    return likely.clamp(min=1e-30).log()


def expected_length(
    probabilities: Sequence[float],
    shape: DraftShape,
    shares: Sequence[float] = RANK_SHARES,
    concentration: float = CONFIDENCE_CONCENTRATION,
    draws: int = 2000,
) -> float:
    """The acceptance length of trees by this model, as the mean over so many of them."""
    padded = [*probabilities, *[0.0] * shape.k][: shape.k]
    confidences = draw_confidences(padded, concentration)[:draws]
    likely = rank_probabilities(confidences, torch.tensor(shares))  # [draws, K, M]
    tree = tree_topology(log_probabilities(likely)[:, :, None], shape.nodes)
    each = torch.arange(draws)
    reached = torch.ones(draws, shape.nodes + 1)  # the probability that a row is accepted
    for node in range(shape.nodes):
        parent = tree.parents[:, node].long()
        step = likely[each, tree.depths[:, node].long() - 1, tree.candidates[:, node]]
        reached[:, node + 1] = reached[each, parent] * step
    return reached.sum(1).mean().item()

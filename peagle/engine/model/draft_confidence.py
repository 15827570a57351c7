"""Draft confidence: how likely the drafter finds its own drafts to be accepted."""

import torch
from torch import Tensor

from peagle.drafter import Drafter


def draft_confidence(
    drafter: Drafter, normed: Tensor, ids: Tensor, logp: Tensor, chain: Tensor
) -> Tensor:
    """The probability [B, K] that each draft is accepted, given that those before it are.

    It is the draft's own probability, corrected by the drafter's confidence output if it has one.

    normed [B, K, d]: the drafter's rows; chain [B, K]: the drafts; ids [B, K, M] and
    logp [B, K, 1 or M, M]: the candidates of each depth, and their log-probabilities, after each
    candidate of the depth before if drafts depend on each other.
    """
    # [B, K] index of each draft among the candidates of its depth, and of the draft before it
    index = (drafter.target_token_ids(ids) == chain[..., None]).int().argmax(-1)
    previous = index.roll(1, 1) if logp.shape[2] > 1 else torch.zeros_like(index)
    by_candidate = previous[..., None, None].expand(-1, -1, 1, logp.shape[3])
    draft_logp = logp.gather(2, by_candidate)[:, :, 0].gather(2, index[..., None])
    if drafter.confidence is not None and drafter.dependency is not None and chain.shape[1] > 1:
        embeds = drafter.embed(chain[:, :-1].flatten()).view_as(normed[:, 1:])
        normed = torch.cat([normed[:, :1], drafter.dependency(normed[:, 1:], embeds)], 1)
    return drafter.confidence_logits(normed, draft_logp[..., 0]).sigmoid()

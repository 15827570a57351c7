"""The losses of a chunk of rows and their gradients.

For a row with weight w, teacher distribution p (the target's, over the draft vocabulary) and draft
distribution q:

    kl    w * KL(p || q)             gradient with respect to q's logits  w * (q - p)
    ce    w * -log q[y], y = argmax p                                     w * (q - onehot(y))
    tv    w * sum |q - p| / 2                    w * q * (s - sum q s), s = sign(q - p) / 2
    lk    w * (l * kl + (1 - l) * tv), l = exp(-3 * (1 - tv)), a constant for the gradient
    mix   m * kl + (1 - m) * ce      tvmix   m * tv + (1 - m) * ce        the same mix of gradients
    lk    m * lk + (1 - m) * ce

Total variation is the probability that a draft sampled from q is rejected. Its gradient vanishes
where q hardly overlaps with p, so lk (arXiv 2602.23881) is nearly kl there, and nearly tv where
most drafts are accepted. `length` is ce with weights of its own (length_objective.py).

A captured teacher (`TopKLogits`) holds only its most likely tokens: p is then the softmax over
those of them that lie in the draft vocabulary; a row that has none there has no loss.

lm_head is frozen, so the gradient of a chunk ends at the normed hidden state of the row: it is
computed in the forward pass and given to autograd as it is.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from peagle.train.features.teacher import Teacher, TopKLogits, soft_cap

Distance = Literal["kl", "tv", "lk"]  # between the distributions of teacher and draft

LK_DECAY = 3.0  # how fast lk turns from kl to tv as the acceptance of a row grows


class ChunkLoss(NamedTuple):
    """The losses of a chunk of C rows."""

    loss: Tensor  # [C]
    draft: Tensor  # [C] the row's most likely token, as a draft id
    match: Tensor  # [C] bool: that token is the teacher's
    log_prob: Tensor  # [C] log-probability of the row's own most likely token
    gradient: Tensor  # [C, d] with respect to the normed rows


def hidden_state_loss(
    normed: Tensor,
    teacher: Tensor,
    weight: Tensor,
    lm_head: Tensor,
    mix: float,
    softcap: float,
    kind: Distance = "kl",
) -> ChunkLoss:
    """The loss of normed [C, d] by last hidden states [C, d]; weight [C], lm_head [V, d]."""
    teacher_logits = soft_cap(linear(teacher, lm_head).float(), softcap)
    logits = linear(normed.to(lm_head.dtype), lm_head).float()
    log_q, log_p = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    best = log_p.argmax(-1)
    ce = -log_q.gather(-1, best[:, None])[:, 0]
    distance, grad_logits = (p * (log_p - log_q)).sum(-1), q - p
    if kind != "kl":
        tv = (q - p).abs().sum(-1) / 2
        tv_gradient = total_variation_gradient(q, (q - p).sign() / 2)
        share = kl_share(tv, kind)
        distance = share * distance + (1 - share) * tv
        grad_logits = share[:, None] * grad_logits + (1 - share[:, None]) * tv_gradient
    if mix != 1:
        grad_logits = mix * grad_logits + (1 - mix) * (q - one_hot(best, p.shape[-1]))
    loss = weight * (mix * distance + (1 - mix) * ce)
    log_prob, own_best = log_q.max(-1)
    gradient = linear((weight[:, None] * grad_logits).to(lm_head.dtype), lm_head.T)
    return ChunkLoss(loss, own_best, own_best == best, log_prob, gradient)


def top_k_loss(
    normed: Tensor,
    teacher: TopKLogits,
    weight: Tensor,
    lm_head: Tensor,
    mix: float,
    kind: Distance = "kl",
) -> ChunkLoss:
    """The same for a teacher that holds only its most likely tokens, k for each row."""
    known, ids, best = teacher.known()
    weight = weight * known.any(-1)
    logits = linear(normed.to(lm_head.dtype), lm_head).float()
    log_q = logits.log_softmax(-1)
    log_p = teacher.logits.float().masked_fill(~known, -1e30).log_softmax(-1)  # [C, k]
    q, p = log_q.exp(), log_p.exp() * known
    log_q_known = log_q.gather(-1, ids)  # [C, k]
    ce = -log_q.gather(-1, best)[:, 0]
    distance, grad_logits = (p * (log_p - log_q_known)).sum(-1), q.scatter_add(-1, ids, -p)
    if kind != "kl":
        excess = log_q_known.exp() - p  # p is 0 for all other tokens
        tv = (1 + ((excess.abs() - log_q_known.exp()) * known).sum(-1)) / 2
        side = torch.full_like(q, 0.5).scatter_add(-1, ids, (excess.sign() - 1) / 2 * known)
        share = kl_share(tv, kind)
        distance = share * distance + (1 - share) * tv
        tv_gradient = total_variation_gradient(q, side)
        grad_logits = share[:, None] * grad_logits + (1 - share[:, None]) * tv_gradient
    ce_gradient = q.scatter_add(-1, best, -torch.ones_like(p[:, :1]))
    grad_logits = mix * grad_logits + (1 - mix) * ce_gradient
    loss = weight * (mix * distance + (1 - mix) * ce)
    log_prob, own_best = log_q.max(-1)
    match = (own_best == best[:, 0]) & known.any(-1)
    gradient = linear((weight[:, None] * grad_logits).to(lm_head.dtype), lm_head.T)
    return ChunkLoss(loss, own_best, match, log_prob, gradient)


def total_variation_gradient(q: Tensor, side: Tensor) -> Tensor:
    """The gradient of sum(q * side) with respect to q's logits, for a constant `side`."""
    return q * (side - (q * side).sum(-1, keepdim=True))


def kl_share(tv: Tensor, kind: Distance) -> Tensor:
    """The share of kl in the loss of rows with this total variation, [C]; the rest is tv."""
    return torch.exp(LK_DECAY * (tv - 1)) if kind == "lk" else torch.zeros_like(tv)


def chunk_loss(
    normed: Tensor,
    teacher: Teacher,
    weight: Tensor,
    lm_head: Tensor,
    mix: float,
    softcap: float,
    kind: Distance = "kl",
) -> ChunkLoss:
    """The loss by the teacher's type; captured logits are soft-capped already."""
    if isinstance(teacher, TopKLogits):
        return top_k_loss(normed, teacher, weight, lm_head, mix, kind)
    return hidden_state_loss(normed, teacher, weight, lm_head, mix, softcap, kind)


def teacher_token_prob(normed: Tensor, teacher: Teacher, lm_head: Tensor) -> Tensor:
    """q[y] of every row, [C]: the probability that it drafts the teacher's most likely token."""
    if isinstance(teacher, TopKLogits):
        known, _, best = teacher.known()
    else:
        best = linear(teacher, lm_head).argmax(-1, keepdim=True)
    log_q = linear(normed.to(lm_head.dtype), lm_head).float().log_softmax(-1)
    q = log_q.gather(-1, best)[:, 0].exp()
    return q * known.any(-1) if isinstance(teacher, TopKLogits) else q

"""Losses over rows, in chunks: [rows, vocabulary] is never there whole, and its gradient never kept.

For a row with weight w, teacher distribution p (the target's, over the draft vocabulary) and draft distribution q:

    kl    w * KL(p || q)                 gradient with respect to q's logits  w * (q - p)
    ce    w * -log q[y], y = argmax p                                         w * (q - onehot(y))
    mix   m * kl + (1 - m) * ce                                               w * (q - (m p + (1 - m) onehot(y)))

A captured teacher (`TopK`) knows only its likeliest tokens: p is then the softmax over those of them that lie in the
draft vocabulary; a row that has none there counts nothing.

lm_head is frozen, so a chunk's gradient ends at the row's normed hidden state: computed in the forward, handed to
autograd as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

CHUNK = 4096


@dataclass(slots=True)
class Sums:
    """Per depth, [K] each: what is drawn and logged. Stays on the device."""

    loss: Tensor
    matches: Tensor  # rows whose best token is the teacher's best
    rows: Tensor

    @classmethod
    def zeros(cls, k: int, device: torch.device | str) -> "Sums":
        return cls(*(torch.zeros(k, device=device, dtype=torch.float64) for _ in range(3)))

    def __iadd__(self, other: "Sums") -> "Sums":
        self.loss += other.loss
        self.matches += other.matches
        self.rows += other.rows
        return self


@dataclass(frozen=True, slots=True)
class TopK:
    """The teacher's likeliest tokens at each row, the likeliest first."""

    logits: Tensor  # [R, k], up to a constant a row
    ids: Tensor  # [R, k] in the draft vocabulary; -1: outside

    def __getitem__(self, rows: Tensor | slice) -> "TopK":
        return TopK(self.logits[rows], self.ids[rows])

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def padded(self, rows: int) -> "TopK":
        return TopK(padded(self.logits, rows), padded(self.ids, rows))


Teacher = Tensor | TopK  # last hidden states [R, d], or what a capture kept of the distributions


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Gemma's soft-capping of the target's logits; 0: none."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def chunk_loss(
    normed: Tensor, teacher: Tensor, weight: Tensor, lm_head: Tensor, mix: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """normed, teacher [C, d], weight [C], lm_head [V, d] -> (loss [C], match [C], gradient [C, d])."""
    teacher_logits = capped(linear(teacher, lm_head).float(), softcap)
    logits = linear(normed.to(lm_head.dtype), lm_head).float()
    log_q, log_p = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    p = log_p.exp()
    best = log_p.argmax(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    ce = -log_q.gather(-1, best[:, None])[:, 0]
    wanted = p if mix == 1 else mix * p + (1 - mix) * one_hot(best, p.shape[-1])
    gradient = weight[:, None] * (log_q.exp() - wanted)
    loss = weight * (mix * kl + (1 - mix) * ce)
    return loss, logits.argmax(-1) == best, linear(gradient.to(lm_head.dtype), lm_head.T)


def topk_loss(
    normed: Tensor, teacher: TopK, weight: Tensor, lm_head: Tensor, mix: float
) -> tuple[Tensor, Tensor, Tensor]:
    """chunk_loss for a teacher that knows its likeliest tokens only."""
    inside, ids = teacher.ids >= 0, teacher.ids.clamp(min=0).long()
    weight = weight * inside.any(-1)
    logits = linear(normed.to(lm_head.dtype), lm_head).float()
    log_q = logits.log_softmax(-1)
    log_p = teacher.logits.float().masked_fill(~inside, -1e30).log_softmax(-1)  # [C, k]
    p = log_p.exp() * inside
    first = inside.int().argmax(-1, keepdim=True)  # the likeliest, even where rounding made it a tie
    best = ids.gather(-1, first)
    kl = (p * (log_p - log_q.gather(-1, ids))).sum(-1)
    ce = -log_q.gather(-1, best)[:, 0]
    gradient = log_q.exp().scatter_add(-1, ids, -mix * p).scatter_add(-1, best, (mix - 1) * torch.ones_like(p[:, :1]))
    loss = weight * (mix * kl + (1 - mix) * ce)
    match = (logits.argmax(-1) == best[:, 0]) & inside.any(-1)
    return loss, match, linear((weight[:, None] * gradient).to(lm_head.dtype), lm_head.T)


def teacher_loss(
    normed: Tensor, teacher: Teacher, weight: Tensor, lm_head: Tensor, mix: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By the teacher's type; captured logits are soft-capped already."""
    if isinstance(teacher, TopK):
        return topk_loss(normed, teacher, weight, lm_head, mix)
    return chunk_loss(normed, teacher, weight, lm_head, mix, softcap)


def padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


class Loss:
    """The loss of a set of rows and its gradient with respect to their normed outputs."""

    def __init__(self, lm_head: Tensor, k: int, kind: str, mix: float, depth_weight: float, softcap: float) -> None:
        self.lm_head, self.k, self.softcap = lm_head, k, softcap
        self.mix = {"kl": 1.0, "ce": 0.0, "mix": mix}[kind]
        self.weights = depth_weight ** torch.arange(k, device=lm_head.device, dtype=torch.float32)
        self.chunk: Callable[..., tuple[Tensor, Tensor, Tensor]] = teacher_loss  # trainer.py compiles it on a GPU

    @torch.no_grad()
    def __call__(self, normed: Tensor, teacher: Teacher, depth: Tensor, scale: Tensor | float) -> tuple[Tensor, Sums]:
        """normed [R, d], teacher [R, d] or TopK, depth [R] -> (gradient [R, d], sums).

        The gradient is that of sum(weight * loss) * scale.
        """
        rows, gradient = len(normed), torch.empty_like(normed)
        losses, matches = (torch.empty(rows, device=normed.device) for _ in range(2))
        weight = self.weights[depth] * scale
        for start in range(0, rows, CHUNK):
            at = slice(start, min(start + CHUNK, rows))
            out, known, heavy = normed[at], teacher[at], weight[at]
            count = len(out)
            if count < CHUNK <= rows:  # one shape for compiled code
                out, heavy = padded(out, CHUNK), padded(heavy, CHUNK)
                known = known.padded(CHUNK) if isinstance(known, TopK) else padded(known, CHUNK)
            loss, match, grad = self.chunk(out, known, heavy, self.lm_head, self.mix, self.softcap)
            losses[at], matches[at], gradient[at] = loss[:count], match[:count], grad[:count]
        sums = Sums.zeros(self.k, normed.device)
        sums.loss.index_add_(0, depth, (losses / weight.clamp(min=1e-30)).double())
        self.matched = matches  # of these rows, for whoever learns from that
        sums.matches.index_add_(0, depth, matches.double())
        sums.rows.index_add_(0, depth, torch.ones_like(depth, dtype=torch.float64))
        return gradient, sums

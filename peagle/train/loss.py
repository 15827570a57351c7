"""Losses over rows, in chunks: [rows, vocabulary] is never there whole, and its gradient never kept.

For a row with weight w, teacher distribution p (the target's, over the draft vocabulary) and draft distribution q:

    kl    w * KL(p || q)                 gradient with respect to q's logits  w * (q - p)
    ce    w * -log q[y], y = argmax p                                         w * (q - onehot(y))
    mix   m * kl + (1 - m) * ce                                               w * (q - (m p + (1 - m) onehot(y)))

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


def chunk_loss(
    normed: Tensor, teacher: Tensor, weight: Tensor, lm_head: Tensor, mix: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """normed, teacher [C, d], weight [C], lm_head [V, d] -> (loss [C], match [C], gradient [C, d])."""
    teacher_logits = linear(teacher, lm_head).float()
    if softcap:
        teacher_logits = softcap * torch.tanh(teacher_logits / softcap)
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


class Loss:
    """The loss of a set of rows and its gradient with respect to their normed outputs."""

    def __init__(self, lm_head: Tensor, k: int, kind: str, mix: float, depth_weight: float, softcap: float) -> None:
        self.lm_head, self.k, self.softcap = lm_head, k, softcap
        self.mix = {"kl": 1.0, "ce": 0.0, "mix": mix}[kind]
        self.weights = depth_weight ** torch.arange(k, device=lm_head.device, dtype=torch.float32)
        self.chunk: Callable[..., tuple[Tensor, Tensor, Tensor]] = chunk_loss  # trainer.py compiles it on a GPU

    @torch.no_grad()
    def __call__(self, normed: Tensor, teacher: Tensor, depth: Tensor, scale: Tensor | float) -> tuple[Tensor, Sums]:
        """normed, teacher [R, d] (teacher: the target's last hidden state), depth [R] -> (gradient [R, d], sums).

        The gradient is that of sum(weight * loss) * scale.
        """
        rows, gradient = len(normed), torch.empty_like(normed)
        losses, matches = (torch.empty(rows, device=normed.device) for _ in range(2))
        weight = self.weights[depth] * scale
        for start in range(0, rows, CHUNK):
            at = slice(start, min(start + CHUNK, rows))
            args = [normed[at], teacher[at], weight[at]]
            count = len(args[0])
            if count < CHUNK <= rows:  # one shape for compiled code
                args = [torch.cat([x, x.new_zeros(CHUNK - count, *x.shape[1:])]) for x in args]
            loss, match, grad = self.chunk(*args, self.lm_head, self.mix, self.softcap)
            losses[at], matches[at], gradient[at] = loss[:count], match[:count], grad[:count]
        sums = Sums.zeros(self.k, normed.device)
        sums.loss.index_add_(0, depth, (losses / weight.clamp(min=1e-30)).double())
        sums.matches.index_add_(0, depth, matches.double())
        sums.rows.index_add_(0, depth, torch.ones_like(depth, dtype=torch.float64))
        return gradient, sums

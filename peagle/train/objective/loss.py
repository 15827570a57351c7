"""Losses over rows, in chunks: [rows, vocabulary] is never there whole, and its gradient never kept.

For a row with weight w, teacher distribution p (the target's, over the draft vocabulary) and draft distribution q:

    kl    w * KL(p || q)                 gradient with respect to q's logits  w * (q - p)
    ce    w * -log q[y], y = argmax p                                         w * (q - onehot(y))
    tv    w * sum |q - p| / 2                                                 w * q * (s - sum q s), s = sign(q - p) / 2
    mix   m * kl + (1 - m) * ce          tvmix   m * tv + (1 - m) * ce        the same mix of them

Total variation is the probability that a draft sampled from q is refused. `length` is ce with weights of its own
(lengths.py).

A captured teacher (`TopK`) knows only its likeliest tokens: p is then the softmax over those of them that lie in the
draft vocabulary; a row that has none there counts nothing.

lm_head is frozen, so a chunk's gradient ends at the row's normed hidden state: computed in the forward, handed to
autograd as it is.
"""

from collections.abc import Callable, Iterator
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

    def known(self) -> tuple[Tensor, Tensor, Tensor]:
        """(which lie in the draft vocabulary [R, k], ids, 0 for the others [R, k], the likeliest of them [R, 1])."""
        inside, ids = self.ids >= 0, self.ids.clamp(min=0).long()
        first = inside.int().argmax(
            -1, keepdim=True
        )  # the likeliest, even where rounding made it a tie
        return inside, ids, ids.gather(-1, first)

    def padded(self, rows: int) -> "TopK":
        return TopK(padded(self.logits, rows), padded(self.ids, rows))


Teacher = Tensor | TopK  # last hidden states [R, d], or what a capture kept of the distributions


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Gemma's soft-capping of the target's logits; 0: none."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def chunk_loss(
    normed: Tensor,
    teacher: Tensor,
    weight: Tensor,
    lm_head: Tensor,
    mix: float,
    softcap: float,
    tv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """normed, teacher [C, d], weight [C], lm_head [V, d] -> (loss, match, log-probability of the row's own best token,
    [C] each; gradient [C, d])."""
    teacher_logits = capped(linear(teacher, lm_head).float(), softcap)
    logits = linear(normed.to(lm_head.dtype), lm_head).float()
    log_q, log_p = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    best = log_p.argmax(-1)
    ce = -log_q.gather(-1, best[:, None])[:, 0]
    if tv:
        apart = (q - p).abs().sum(-1) / 2
        pull = variation_gradient(q, (q - p).sign() / 2)
    else:
        apart = (p * (log_p - log_q)).sum(-1)
        pull = q - p
    if mix != 1:
        pull = mix * pull + (1 - mix) * (q - one_hot(best, p.shape[-1]))
    loss = weight * (mix * apart + (1 - mix) * ce)
    sure, own = log_q.max(-1)
    return loss, own == best, sure, linear((weight[:, None] * pull).to(lm_head.dtype), lm_head.T)


def topk_loss(
    normed: Tensor, teacher: TopK, weight: Tensor, lm_head: Tensor, mix: float, tv: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """chunk_loss for a teacher that knows its likeliest tokens only."""
    inside, ids, best = teacher.known()
    weight = weight * inside.any(-1)
    logits = linear(normed.to(lm_head.dtype), lm_head).float()
    log_q = logits.log_softmax(-1)
    log_p = teacher.logits.float().masked_fill(~inside, -1e30).log_softmax(-1)  # [C, k]
    q, p = log_q.exp(), log_p.exp() * inside
    there = log_q.gather(-1, ids)  # [C, k]
    ce = -log_q.gather(-1, best)[:, 0]
    if tv:
        more = there.exp() - p  # elsewhere p is 0
        apart = (1 + ((more.abs() - there.exp()) * inside).sum(-1)) / 2
        side = torch.full_like(q, 0.5).scatter_add(-1, ids, (more.sign() - 1) / 2 * inside)
        pull = variation_gradient(q, side)
    else:
        apart = (p * (log_p - there)).sum(-1)
        pull = q.scatter_add(-1, ids, -p)
    pull = mix * pull + (1 - mix) * q.scatter_add(-1, best, -torch.ones_like(p[:, :1]))
    loss = weight * (mix * apart + (1 - mix) * ce)
    sure, own = log_q.max(-1)
    match = (own == best[:, 0]) & inside.any(-1)
    return loss, match, sure, linear((weight[:, None] * pull).to(lm_head.dtype), lm_head.T)


def variation_gradient(q: Tensor, side: Tensor) -> Tensor:
    """Of sum(q * side) with respect to q's logits, side being constant."""
    return q * (side - (q * side).sum(-1, keepdim=True))


def teacher_loss(
    normed: Tensor,
    teacher: Teacher,
    weight: Tensor,
    lm_head: Tensor,
    mix: float,
    softcap: float,
    tv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By the teacher's type; captured logits are soft-capped already."""
    if isinstance(teacher, TopK):
        return topk_loss(normed, teacher, weight, lm_head, mix, tv)
    return chunk_loss(normed, teacher, weight, lm_head, mix, softcap, tv)


def chance(normed: Tensor, teacher: Teacher, lm_head: Tensor) -> Tensor:
    """q[y] of every row, [C]: how likely it drafts the teacher's best."""
    if isinstance(teacher, TopK):
        inside, _, best = teacher.known()
    else:
        best = linear(teacher, lm_head).argmax(-1, keepdim=True)
    log_q = linear(normed.to(lm_head.dtype), lm_head).float().log_softmax(-1)
    q = log_q.gather(-1, best)[:, 0].exp()
    return q * inside.any(-1) if isinstance(teacher, TopK) else q


def padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])]) if rows > len(x) else x


def known_padded(x: Teacher, rows: int) -> Teacher:
    return x.padded(rows) if isinstance(x, TopK) else padded(x, rows)


class Loss:
    """The loss of a set of rows and its gradient with respect to their normed outputs."""

    def __init__(
        self, lm_head: Tensor, k: int, kind: str, mix: float, depth_weight: float, softcap: float
    ) -> None:
        self.lm_head, self.k, self.softcap = lm_head, k, softcap
        self.mix = {"kl": 1.0, "ce": 0.0, "mix": mix, "tv": 1.0, "tvmix": mix, "length": 0.0}[kind]
        self.tv = kind in ("tv", "tvmix")
        self.length = mix if kind == "length" else 0.0  # share of the acceptance length: lengths.py
        self.weights = depth_weight ** torch.arange(k, device=lm_head.device, dtype=torch.float32)
        self.chunk: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = teacher_loss
        self.look: Callable[..., Tensor] = chance

    def compile(self) -> None:
        self.chunk, self.look = torch.compile(self.chunk), torch.compile(self.look)

    @torch.no_grad()
    def __call__(
        self, normed: Tensor, teacher: Teacher, depth: Tensor, scale: Tensor | float
    ) -> tuple[Tensor, Sums]:
        """normed [R, d], teacher [R, d] or TopK, depth [R] -> (gradient [R, d], sums).

        The gradient is that of sum(weight * loss * scale); scale may be [R].
        """
        rows, gradient = len(normed), torch.empty_like(normed)
        losses, matches, sure = (torch.empty(rows, device=normed.device) for _ in range(3))
        weight = self.weights[depth] * scale
        for at, size in chunks(rows):
            heavy = padded(weight[at], size)
            out, known = padded(normed[at], size), known_padded(teacher[at], size)
            loss, match, best, grad = self.chunk(
                out, known, heavy, self.lm_head, self.mix, self.softcap, self.tv
            )
            count = at.stop - at.start
            losses[at], matches[at], sure[at] = loss[:count], match[:count], best[:count]
            gradient[at] = grad[:count]
        sums = Sums.zeros(self.k, normed.device)
        sums.loss.index_add_(0, depth, (losses / weight.clamp(min=1e-30)).double())
        self.matched, self.sure = matches, sure  # of these rows, for whoever learns from that
        sums.matches.index_add_(0, depth, matches.double())
        sums.rows.index_add_(0, depth, torch.ones_like(depth, dtype=torch.float64))
        return gradient, sums

    @torch.no_grad()
    def chances(self, normed: Tensor, teacher: Teacher) -> Tensor:
        """q[y] of every row, [R]."""
        out = torch.empty(len(normed), device=normed.device)
        for at, size in chunks(len(normed)):
            part = self.look(
                padded(normed[at], size), known_padded(teacher[at], size), self.lm_head
            )
            out[at] = part[: at.stop - at.start]
        return out


def chunks(rows: int) -> Iterator[tuple[slice, int]]:
    """Rows of a chunk, and how many it is padded to: from one chunk on, one shape for compiled code."""
    for start in range(0, rows, CHUNK):
        stop = min(start + CHUNK, rows)
        yield slice(start, stop), min(rows, CHUNK)

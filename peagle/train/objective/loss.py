"""The loss of a set of rows, in chunks: logits of [rows, vocabulary] never exist as a whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.train.features.teacher import Teacher, pad_rows, pad_teacher
from peagle.train.objective.chunk_loss import (
    ChunkLoss,
    Distance,
    chunk_loss,
    teacher_token_prob,
)

CHUNK_ROWS = 4096
CE_ONLY = ("ce", "length", "dpace", "tree")  # losses that are cross-entropy with weights


@dataclass(slots=True)
class LossSums:
    """Sums for each depth, [K] each, that are logged. They stay on the device."""

    loss: Tensor
    matches: Tensor  # rows whose most likely token is the teacher's
    rows: Tensor

    @classmethod
    def zeros(cls, k: int, device: torch.device | str) -> "LossSums":
        return cls(*(torch.zeros(k, device=device, dtype=torch.float64) for _ in range(3)))

    def __iadd__(self, other: "LossSums") -> "LossSums":
        self.loss += other.loss
        self.matches += other.matches
        self.rows += other.rows
        return self


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The losses of R rows."""

    gradient: Tensor  # [R, d] of sum(weight * loss * scale) with respect to the normed rows
    sums: LossSums
    drafts: Tensor  # [R] the row's most likely token, as a draft id
    matches: Tensor  # [R] 1 where that token is the teacher's, else 0
    log_probs: Tensor  # [R] log-probability of the row's own most likely token

    def weighted(self, weights: Tensor | float) -> "LossOutput":
        """The output for rows with these weights, [R]; sums do not depend on weights."""
        factor = weights[:, None] if isinstance(weights, Tensor) else weights
        return replace(self, gradient=(self.gradient * factor).to(self.gradient.dtype))


def rows_reached(matches: Tensor, anchor: Tensor, depth: Tensor, tokens: int, k: int) -> Tensor:
    """[R]: 1 where the drafts of all rows before a row of its chain match the teacher's, else 0.

    matches, anchor, depth [R]: whole chains, depth 0 included, of a pack with `tokens` tokens.
    """
    match = torch.zeros(tokens, k + 1, device=matches.device)
    match[:, 0] = 1
    match[anchor, depth + 1] = matches
    return match.cumprod(1)[anchor, depth]


class Loss:
    """The loss of a set of rows and its gradient with respect to their normed outputs."""

    def __init__(
        self,
        lm_head: Tensor,
        k: int,
        kind: str,
        mix: float,
        depth_weight: float,
        softcap: float,
        chunk_rows: int = CHUNK_ROWS,
        on_policy: float = 0.0,
    ) -> None:
        self.lm_head = lm_head
        self.k = k
        self.softcap = softcap
        self.chunk_rows = chunk_rows
        self.on_policy = on_policy  # see on_policy.py
        self.mix = 0.0 if kind in CE_ONLY else {"kl": 1.0, "tv": 1.0}.get(kind, mix)
        distances: dict[str, Distance] = {"tv": "tv", "tvmix": "tv", "lk": "lk"}
        self.distance: Distance = distances.get(kind, "kl")
        # See length_objective.py for these three.
        self.length_share = {"length": mix, "tree": mix, "dpace": 1.0}.get(kind, 0.0)
        self.smoothing = mix if kind == "dpace" else 0.0
        self.tree = kind == "tree"
        self.depth_weights = depth_weight ** torch.arange(
            k, device=lm_head.device, dtype=torch.float32
        )
        self.chunk_loss: Callable[..., ChunkLoss] = chunk_loss
        self.chunk_prob: Callable[..., Tensor] = teacher_token_prob

    def compile(self) -> None:
        self.chunk_loss = torch.compile(self.chunk_loss)
        self.chunk_prob = torch.compile(self.chunk_prob)

    @torch.no_grad()
    def __call__(
        self, normed: Tensor, teacher: Teacher, depth: Tensor, scale: Tensor | float
    ) -> LossOutput:
        """normed [R, d], teacher of R rows, depth [R]; scale is a number or [R]."""
        rows = len(normed)
        gradient = torch.empty_like(normed)
        losses, matches, log_probs = (torch.empty(rows, device=normed.device) for _ in range(3))
        drafts = torch.empty(rows, dtype=torch.int64, device=normed.device)
        weight = self.depth_weights[depth] * scale
        for chunk, size in self._chunks(rows):
            chunk_weight = pad_rows(weight[chunk], size)
            part = self.chunk_loss(
                pad_rows(normed[chunk], size),
                pad_teacher(teacher[chunk], size),
                chunk_weight,
                self.lm_head,
                self.mix,
                self.softcap,
                self.distance,
            )
            count = chunk.stop - chunk.start
            losses[chunk] = part.loss[:count]
            drafts[chunk] = part.draft[:count]
            matches[chunk] = part.match[:count]
            log_probs[chunk] = part.log_prob[:count]
            gradient[chunk] = part.gradient[:count]
        sums = LossSums.zeros(self.k, normed.device)
        sums.loss.index_add_(0, depth, (losses / weight.clamp(min=1e-30)).double())
        sums.matches.index_add_(0, depth, matches.double())
        sums.rows.index_add_(0, depth, torch.ones_like(depth, dtype=torch.float64))
        return LossOutput(gradient, sums, drafts, matches, log_probs)

    @torch.no_grad()
    def teacher_token_probs(self, normed: Tensor, teacher: Teacher) -> Tensor:
        """q[y] of every row, [R]."""
        probs = torch.empty(len(normed), device=normed.device)
        for chunk, size in self._chunks(len(normed)):
            padded_teacher = pad_teacher(teacher[chunk], size)
            part = self.chunk_prob(pad_rows(normed[chunk], size), padded_teacher, self.lm_head)
            probs[chunk] = part[: chunk.stop - chunk.start]
        return probs

    def _chunks(self, rows: int) -> Iterator[tuple[slice, int]]:
        """The rows and the padded size of each chunk: compiled code sees one shape."""
        for start in range(0, rows, self.chunk_rows):
            stop = min(start + self.chunk_rows, rows)
            yield slice(start, stop), min(rows, self.chunk_rows)

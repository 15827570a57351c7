"""What may follow: the likeliest tokens of each depth, and how likely each is behind those of the depth before.

From the rows of one parallel pass. Without a dependency a depth does not know the one before: then there is one line of
log-probabilities a depth, else one for each candidate before. Both are calibrated (`DrafterConfig.calibration`).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.draft_shape import CANDIDATES_PER_DEPTH
from peagle.drafter.model import Drafter
from peagle.kernels.triton.candidate_pairs import DependencyTerms, candidate_pairs
from peagle.kernels.triton.candidates import candidates

Product = Callable[[Tensor], Tensor]


def plain(weight: Tensor) -> Product:
    return lambda x: linear(x, weight)


class Branching:
    @torch.no_grad()
    def __init__(
        self,
        drafter: Drafter,
        product: Callable[[Tensor], Product] = plain,
        calibration: tuple[float, ...] = (),
    ) -> None:
        """`product`: how rows are multiplied with a matrix; `calibration`: instead of the drafter's own."""
        config, ids = drafter.config, drafter.target_ids
        self.device = drafter.lm_head.device
        self.count = min(CANDIDATES_PER_DEPTH, config.draft_vocab_size)
        self.calibration = calibration or config.calibration or (1.0,)
        self.factors: dict[tuple[int, int], Tensor] = {}
        self.here: Product | None = None
        if drafter.dependency is not None:
            self.here = product(drafter.dependency.here.weight.detach())
            before, after = drafter.dependency.tables(drafter.embed_tokens, drafter.lm_head)
            self.before, self.after = (
                (before if ids is None else before[ids]).contiguous(),
                after.contiguous(),
            )

    def __call__(self, normed: Tensor, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """normed [B * K, d] and its logits -> (ids [B, K, M] of the draft vocabulary, logp [B, K, 1 or M, M])."""
        shape = (-1, k, self.count)
        factor = self.factor(len(normed) // k, k)
        top = candidates(logits, factor, self.count)
        if self.here is None:
            logp = (top.logits - top.logsumexp[:, None]).view(shape)[:, :, None]
        else:
            terms = DependencyTerms(self.here(normed), self.before, self.after)
            logp = candidate_pairs(top, factor, terms, k).view(*shape, self.count)
        return top.ids.view(shape), logp

    def factor(self, batch: int, k: int) -> Tensor:
        """[B * K]: what logits are multiplied by, by depth. Kept: a graph reads it where it lies."""
        if (batch, k) not in self.factors:
            told = (*self.calibration, *[self.calibration[-1]] * k)[:k]
            self.factors[batch, k] = torch.tensor(told, device=self.device).repeat(batch)
        return self.factors[batch, k]

"""Candidates of every depth and their log-probabilities, from the rows of one parallel pass.

A depth has M candidates. Without a dependency the depths are independent of each other, and each
has one line of M log-probabilities. With a dependency each has M lines, one for every candidate of
the depth before. Both are calibrated (`DrafterConfig.calibration`).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.draft_shape import CANDIDATES_PER_DEPTH
from peagle.drafter.dependency import Dependency
from peagle.drafter.model import Drafter
from peagle.kernels.stored_matrix import table_rows
from peagle.kernels.triton.candidate_pairs import DependencyTerms, candidate_pairs
from peagle.kernels.triton.candidates import candidates

TABLE_PART = 4096  # rows of a stored table that are widened at once
Product = Callable[[Tensor], Tensor]


def plain_product(weight: Tensor) -> Product:
    return lambda x: linear(x, weight.to(x.dtype))


def dependency_tables(drafter: Drafter, dependency: Dependency) -> tuple[Tensor, Tensor]:
    """`Dependency.tables` of the whole vocabulary; tables as stored are widened in parts."""
    embeddings = drafter.embed_table
    head = drafter.head_table
    if isinstance(embeddings, Tensor) and isinstance(head, Tensor):
        return dependency.tables(embeddings, head)
    terms: list[list[Tensor]] = []
    for i, table in enumerate((embeddings, head)):
        parts = torch.arange(len(table), device=table.device).split(TABLE_PART)
        rows = (table_rows(table, ids, drafter.dtype) for ids in parts)
        terms.append([dependency.tables(part, part)[i] for part in rows])
    return torch.cat(terms[0]), torch.cat(terms[1])


def draft_vocab_tables(drafter: Drafter, dependency: Dependency) -> tuple[Tensor, Tensor]:
    """`dependency_tables` of the draft vocabulary."""
    previous, candidate = dependency_tables(drafter, dependency)
    if drafter.target_ids is not None:
        previous = previous[drafter.target_ids]
    return previous.contiguous(), candidate.contiguous()


class Branching:
    @torch.no_grad()
    def __init__(
        self,
        drafter: Drafter,
        make_product: Callable[[Tensor], Product] = plain_product,
        calibration: tuple[float, ...] = (),
    ) -> None:
        """`make_product` turns a matrix into a function that multiplies rows with it.

        `calibration` replaces the drafter's own.
        """
        config = drafter.config
        self.device = drafter.head_table.device
        self.count = min(CANDIDATES_PER_DEPTH, config.draft_vocab_size)
        self.calibration = calibration or config.calibration or (1.0,)
        self.factors: dict[tuple[int, int], Tensor] = {}
        self.here: Product | None = None
        if drafter.dependency is not None:
            self.here = make_product(drafter.dependency.here.weight.detach())
            # [draft_vocab_size, r] each
            self.previous, self.candidate = draft_vocab_tables(drafter, drafter.dependency)

    @torch.no_grad()
    def update(self, drafter: Drafter) -> None:
        """Follow new weights and a new calibration of the drafter, at the same addresses."""
        if drafter.dependency is not None:
            previous, candidate = draft_vocab_tables(drafter, drafter.dependency)
            self.previous.copy_(previous)
            self.candidate.copy_(candidate)
        self.calibration = drafter.config.calibration or (1.0,)
        for (batch, k), factor in self.factors.items():
            factor.copy_(self._make_factor(batch, k))

    def __call__(self, normed: Tensor, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """normed [B * K, d] and its logits -> (ids [B, K, M], logprobs [B, K, 1 or M, M]).

        The ids are those of the draft vocabulary.
        """
        shape = (-1, k, self.count)
        factor = self.calibration_factor(len(normed) // k, k)
        top = candidates(logits, factor, self.count)
        if self.here is None:
            logprobs = (top.logits - top.logsumexp[:, None]).view(shape)[:, :, None]
        else:
            terms = DependencyTerms(self.here(normed), self.previous, self.candidate)
            logprobs = candidate_pairs(top, factor, terms, k).view(*shape, self.count)
        return top.ids.view(shape), logprobs

    def calibration_factor(self, batch: int, k: int) -> Tensor:
        """[B * K] factors of the logits by depth; depths behind the last given one repeat it.

        The tensor is cached and never moves, because a CUDA graph reads it at its address.
        """
        if (batch, k) not in self.factors:
            self.factors[batch, k] = self._make_factor(batch, k)
        return self.factors[batch, k]

    def _make_factor(self, batch: int, k: int) -> Tensor:
        factors = (*self.calibration, *[self.calibration[-1]] * k)[:k]
        return torch.tensor(factors, device=self.device).repeat(batch)

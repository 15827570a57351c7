"""The objective of a refinement (drafter/refinement.py): the mean of the losses of all its passes.

Pass 0 is the drafter itself, whose drafts stay good because they keep their loss; pass p >= 1 is
fed the drafts of pass p - 1, without a gradient through them. Depth 0 is fed the newest token in
every pass, and deeper rows are fed in two ways:

    chains of odd anchors     the drafts, as in decoding (on-policy). A row counts only if all
                              drafts of this pass before it are right.
    chains of even anchors    the real tokens (teacher forcing). All rows count.

A row behind a wrong draft is never verified, and its teacher continues the real token instead of
the draft: with a loss there, the refinement would learn to distrust what it is fed. Where the draft
that was fed is wrong but its row is corrected by this pass, the row behind it counts, and learns
that. Deep rows are rarely reached this way, so teacher forcing adds rows of every depth; it equals
decoding wherever the drafts that were fed are right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from peagle.drafter import Drafter
from peagle.train.data.attention_mask import RowSet, build_mask
from peagle.train.data.pack import Batch, ChainLevel
from peagle.train.features.teacher import Teacher
from peagle.train.objective.loss import Loss, LossOutput, rows_reached
from peagle.train.objective.passes import DrafterPasses, PassCache, rows_before_in_chain


def pass_shares(drafter: Drafter) -> tuple[float, ...]:
    """The shares of the plain and, if there is a refinement, the refined rows of depth 0.

    All passes but pass 0 give the same refined rows there.
    """
    passes = drafter.config.refinement
    return (1 / (passes + 1), passes / (passes + 1)) if passes else (1.0,)


@dataclass(frozen=True, slots=True)
class ChainRefinement:
    """Refines the chains of a pack; `context`: the losses of depth 0, plain and refined."""

    passes: DrafterPasses
    batch: Batch
    loss: Loss
    context: list[LossOutput]
    scale: float
    flex: bool

    def run(
        self, level: ChainLevel, normed: Tensor, teacher: Teacher, keys: RowSet, cache: PassCache
    ) -> tuple[list[Tensor], list[LossOutput]]:
        """The rows [R, d] of every pass, and the losses of all passes but the last.

        `keys`, `cache`: the context rows that the level sees, and `keys` also its own rows.
        """
        rows = level.rows
        count = level.num_unpadded
        before = rows_before_in_chain(rows, len(keys) - len(rows))
        mask = build_mask(rows.in_blocks, keys, self.flex, level.refinement_lists)
        states = [normed]
        results: list[LossOutput] = []
        for i in range(self.passes.drafter.config.refinement):
            output = states[-1].detach()[:count]
            results.append(self.loss(output, teacher, rows.depth[:count], self.scale))
            own = pad(results[-1].drafts, (0, len(rows) - count))
            drafts = torch.cat([self._context_drafts(i)[: len(keys) - len(rows)], own])[before]
            fed = self._fed_tokens(rows, self.passes.drafter.target_token_ids(drafts))
            states.append(self.passes("refine_chains", normed, fed, rows.depth, cache, mask))
        return states, results

    def weigh(self, rows: RowSet, results: list[LossOutput]) -> list[LossOutput]:
        """The losses of all passes over whole chains, with their shares and the rows that count."""
        share = 1 / len(results)
        weighed = [results[0].weighted(share)]
        for i, result in enumerate(results[1:], start=1):
            counts = is_forced(rows) | self._reached(i, rows, result).bool()
            weighed.append(result.weighted(share * counts))
        return weighed

    def _reached(self, i: int, rows: RowSet, result: LossOutput) -> Tensor:
        """[R]: 1 where all drafts of pass i before a row are right, else 0."""
        first = self.batch.supervised
        matches = torch.cat([self.context[min(i, 1)].matches, result.matches])
        anchor = torch.cat([first, rows.anchor])
        depth = torch.cat([torch.zeros_like(first), rows.depth])
        tokens = len(self.batch.ids)
        return rows_reached(matches, anchor, depth, tokens, self.loss.k)[len(first) :]

    def _context_drafts(self, i: int) -> Tensor:
        """[T]: what pass i drafts at depth 0, as draft ids; 0 where the row is not supervised."""
        drafts = self.context[min(i, 1)].drafts
        zeros = drafts.new_zeros(len(self.batch.ids))
        return zeros.index_copy_(0, self.batch.supervised.long(), drafts)

    def _fed_tokens(self, rows: RowSet, drafts: Tensor) -> Tensor:
        """The tokens before those that the rows predict: real ones or drafts, [R]."""
        ids = self.batch.ids
        real = ids[(rows.anchor + rows.depth + 1).clamp(max=len(ids) - 1)]
        return torch.where(is_forced(rows), real.long(), drafts)


def is_forced(rows: RowSet) -> Tensor:
    """Whether rows are fed real tokens, [R]."""
    return rows.anchor % 2 == 0

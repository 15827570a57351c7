"""Drafts at every anchor of known answers, from which the steps of decoding are replayed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.core import Step
from peagle.draft_shape import DraftShape
from peagle.drafter.branching import Branching
from peagle.train.data.attention_mask import build_mask
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import full_chains
from peagle.train.data.documents import Documents, pack_documents, split_into_packs
from peagle.train.data.pack import Batch, BatchLayout, PackedDocuments, build_batch
from peagle.train.evaluation.replay import (
    chain_matches,
    expected_tokens,
    replay_steps,
    tree_matches,
)
from peagle.train.features.features import FeatureSource
from peagle.train.objective.gradients import run_level
from peagle.train.objective.passes import DrafterPasses, PassCache


class AnchorDrafts(NamedTuple):
    """The drafts of A anchors."""

    anchors: np.ndarray  # [A]
    normed: Tensor  # [A, k, d] the rows' outputs
    drafts: Tensor  # [A, k]


class ContextOutput(NamedTuple):
    """The output of the context pass of a pack."""

    normed: Tensor  # [T, d]
    feedback: Tensor  # [T, d]
    cache: PassCache


@dataclass(frozen=True, slots=True)
class DraftReplay:
    """Drafts at every anchor of known answers and replays the steps of decoding them."""

    passes: DrafterPasses
    features: FeatureSource
    pack_tokens: int
    flex: bool = False
    group_size: int = 4096  # anchors that are drafted for at once
    logit_rows: int = 4096  # rows that have logits at once

    def chain_steps(self, documents: Documents, ks: Sequence[int]) -> dict[int, list[Step]]:
        """The steps of every answer for each K.

        One pass at the largest K serves them all, unless rows see later rows (bidirectional).
        """
        steps: dict[int, list[Step]] = {k: [] for k in ks}
        bidirectional = self.passes.drafter.config.bidirectional
        runs = [[k] for k in ks] if bidirectional else [list(ks)]
        for packed in self.packs(documents):
            for run in runs:
                anchors, drafts = self.draft(packed, max(run))
                for k in run:
                    matches = chain_matches(packed, anchors, drafts, k)
                    steps[k] += replay_steps(packed, anchors, matches, k)
        return steps

    @torch.no_grad()
    def tree_steps(
        self, documents: Documents, shapes: Sequence[DraftShape]
    ) -> dict[DraftShape, list[Step]]:
        """The steps of every answer for each tree shape."""
        steps: dict[DraftShape, list[Step]] = {shape: [] for shape in shapes}
        branching = Branching(self.passes.drafter)
        for packed in self.packs(documents):
            for k in sorted({shape.k for shape in shapes}):
                groups = list(self.anchor_drafts(packed, k))
                if not groups:
                    continue
                anchors = np.concatenate([group.anchors for group in groups])
                expected = [
                    torch.from_numpy(expected_tokens(packed, group.anchors, k)).to(
                        group.normed.device
                    )
                    for group in groups
                ]
                for shape in (shape for shape in shapes if shape.k == k):
                    matches = [
                        self._tree_matches(branching, group.normed, tokens, shape)
                        for group, tokens in zip(groups, expected, strict=True)
                    ]
                    steps[shape] += replay_steps(
                        packed, anchors, torch.cat(matches).cpu().numpy(), k
                    )
        return steps

    def packs(self, documents: Documents) -> Iterator[PackedDocuments]:
        if len(documents):
            order = np.arange(len(documents))
            for chosen in split_into_packs(documents, order, self.pack_tokens):
                yield pack_documents(documents, chosen, self.pack_tokens)

    def draft(self, packed: PackedDocuments, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Anchors [A] and drafts [A, k] at every anchor whose newest token belongs to an answer."""
        anchors = [np.zeros(0, int)]
        drafts = [np.zeros((0, k), int)]
        for group in self.anchor_drafts(packed, k):
            anchors.append(group.anchors)
            drafts.append(group.drafts.cpu().numpy())
        return np.concatenate(anchors), np.concatenate(drafts)

    @torch.no_grad()
    def anchor_drafts(self, packed: PackedDocuments, k: int) -> Iterator[AnchorDrafts]:
        """The drafts at every anchor whose newest token belongs to an answer, in groups."""
        same_doc = packed.doc[1:] == packed.doc[:-1]
        all_anchors = np.flatnonzero(np.append(packed.answer_mask[1:] & same_doc, False))
        config = self.passes.drafter.config
        by_depth = config.method != "p-eagle"
        size = min(self.group_size, len(all_anchors))
        layout = BatchLayout(
            by_depth=by_depth,
            level_sizes=(size,) * (k - 1) if by_depth else (size * (k - 1),),
            flex=self.flex,
            bidirectional=config.bidirectional,
            window=config.sliding_window,
        )
        context = None
        for start in range(0, len(all_anchors), max(size, 1)):
            anchors = all_anchors[start : start + size]
            batch = flatten(build_batch(packed, full_chains(anchors, k), layout))
            batch = batch.to(self.features.target.device)
            context = context or self._run_context(batch)
            yield AnchorDrafts(anchors, *self._run_chains(batch, context, anchors))

    def _run_context(self, batch: Batch) -> ContextOutput:
        mask = build_mask(batch.context, batch.context, self.flex, batch.drafter_block_lists)
        taps = self.features(batch).taps
        return ContextOutput(*self.passes("context", batch.next_ids, taps, batch.positions, mask))

    def _run_chains(
        self, batch: Batch, context: ContextOutput, anchors: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The normed rows [A, k, d] and the drafts [A, k]; EAGLE-3 is fed its own drafts."""
        normed, feedback, cache = context
        by_depth = self.passes.drafter.config.method != "p-eagle"
        rows = [normed[torch.from_numpy(anchors).to(normed.device)][:, None]]
        drafts = [self._best_tokens(rows[0])] if by_depth else []
        keys = batch.context
        for level in batch.segments[0].levels if batch.segments else ():
            keys = keys + level.rows
            ids = pad(drafts[-1][:, 0], len(level.rows)) if by_depth else None
            mask = build_mask(level.rows, keys, self.flex, level.block_lists)
            out, feedback, cache = run_level(self.passes, level, feedback, cache, mask, ids)
            rows.append(out[: level.num_unpadded].unflatten(0, (len(anchors), -1)))
            if by_depth:
                drafts.append(self._best_tokens(rows[-1]))
        normed = torch.cat(rows, 1)
        if by_depth:
            return normed, torch.cat(drafts, 1)
        newest = batch.next_ids[torch.from_numpy(anchors).to(normed.device)]
        refined = self._refine(normed, newest.long())
        return refined, self._best_tokens(refined)

    def _refine(self, normed: Tensor, newest: Tensor) -> Tensor:
        """normed [A, k, d] after the passes of the refinement, if the drafter has one."""
        drafter = self.passes.drafter
        if drafter.refinement is None:
            return normed
        size = max(1, self.logit_rows // normed.shape[1])
        parts = zip(normed.to(drafter.head_dtype).split(size), newest.split(size), strict=True)
        return torch.cat([drafter.refine(*part) for part in parts])

    def _best_tokens(self, normed: Tensor) -> Tensor:
        """normed [A, n, d] -> drafts [A, n], in parts, because [rows, vocabulary] is large."""
        drafter = self.passes.drafter
        anchors_per_part = max(1, self.logit_rows // normed.shape[1])
        parts = normed.to(drafter.head_dtype).split(anchors_per_part)
        return torch.cat([drafter.drafts(part) for part in parts])

    def _tree_matches(
        self, branching: Branching, normed: Tensor, expected: Tensor, shape: DraftShape
    ) -> Tensor:
        """normed [A, k, d], expected [A, k] -> [A]: accepted nodes of the trees of these rows."""
        size = self.logit_rows // shape.k
        parts = zip(normed.split(size), expected.split(size), strict=True)
        drafter = self.passes.drafter
        return torch.cat([tree_matches(drafter, branching, *part, shape) for part in parts])


def pad(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - len(x))])

"""Acceptance length without decoding: all drafts at once, then a walk along the matches.

The target's answer is known. One pass drafts K tokens at every place of it; the step loop would visit only those places
it jumps to: from newest token n, a matches lead to newest token n + a + 1. Greedy answers give the greedy acceptance
length, sampled ones that of sampling, for a draft is kept iff it equals the target's own token (sampling.py). Behind
the end of an answer nothing is known: drafts there count as not accepted.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.core import Step
from peagle.drafter import Drafter
from peagle.train.chains import full_chains
from peagle.train.documents import Documents, fill
from peagle.train.documents import packed as packed_documents
from peagle.train.features import Features
from peagle.train.gradients import run_level
from peagle.train.move import flat
from peagle.train.pack import Batch, Pack, batch_of
from peagle.train.passes import Passes
from peagle.train.rule import mask_for

GROUP = 4096  # anchors that are drafted for at once


@torch.no_grad()
def draft_everywhere(
    passes: Passes, features: Features, packed: Pack, k: int, flex: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(anchors [A], drafts [A, k]): the drafts after every anchor whose newest token belongs to an answer."""
    anchors = np.flatnonzero(np.append(packed.answer[1:] & (packed.doc[1:] == packed.doc[:-1]), False))
    by_depth = passes.drafter.config.method != "p-eagle"
    group = min(GROUP, len(anchors))
    capacity = [group] * (k - 1) if by_depth else [group * (k - 1)]
    context, drafts = None, []
    for start in range(0, len(anchors), max(group, 1)):
        own = anchors[start : start + group]
        batch = batch_of(packed, full_chains(own, k), by_depth, capacity=capacity, flex=flex)
        batch = flat(batch).to(features.target.device)
        if context is None:
            mask = mask_for(batch.context, batch.context, flex, batch.blocks)
            context = passes("context", batch.next_ids, features(batch)[0], batch.position, mask)
        drafts.append(_drafts(passes, batch, context, own, flex).cpu().numpy())
    return anchors, np.concatenate(drafts) if drafts else np.zeros((0, k), dtype=np.int64)


def _drafts(passes: Passes, batch: Batch, context: Any, anchors: np.ndarray, flex: bool) -> Tensor:
    """[A, k]: what each anchor's rows say; EAGLE-3 is fed its own drafts."""
    normed, feedback, cache = context
    by_depth = passes.drafter.config.method != "p-eagle"
    drafts = [best(passes.drafter, normed[torch.from_numpy(anchors).to(normed.device)])]
    seen = batch.context
    for level in batch.segments[0].levels if batch.segments else ():
        seen = seen + level.rows
        ids = pad(drafts[-1], len(level.rows)) if by_depth else None
        mask = mask_for(level.rows, seen, flex, level.blocks)
        out, feedback, cache = run_level(passes, level, feedback, cache, mask, ids)
        own = best(passes.drafter, out[: level.live])
        drafts += [own] if by_depth else own.view(len(anchors), -1).unbind(1)
    return torch.stack(drafts, 1)


def best(drafter: Drafter, normed: Tensor) -> Tensor:
    """In pieces: [rows, vocabulary] is large."""
    return torch.cat([drafter.best(part.to(drafter.lm_head.dtype)) for part in normed.split(4096)])


def pad(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - len(x))])


def walk(packed: Pack, anchors: np.ndarray, drafts: np.ndarray, k: int) -> list[Step]:
    """The steps of decoding every answer of the pack with K = k, without the prefill's first token."""
    size = len(packed.ids)
    place = anchors[:, None] + 2 + np.arange(k)  # draft i of anchor a guesses token a + 2 + i
    inside = np.minimum(place, size - 1)
    known = (place < size) & packed.answer[inside] & (packed.doc[inside] == packed.doc[anchors][:, None])
    matches = np.cumprod((drafts[:, :k] == packed.ids[inside]) & known, 1).sum(1)
    accepted = dict(zip(anchors.tolist(), matches.tolist(), strict=True))
    steps = []
    for first, end in answers(packed):
        newest = first
        while newest < end - 1:
            kept = accepted[newest - 1]
            tokens = packed.ids[newest + 1 : min(newest + 2 + kept, end)]
            steps.append(Step(tuple(tokens.tolist()), drafted=k, accepted=kept))
            newest += kept + 1
    return steps


def answers(packed: Pack) -> list[tuple[int, int]]:
    """[start, end) of every answer in the pack that follows a prompt."""
    marked = np.concatenate([[False], packed.answer, [False]])
    cut = np.concatenate([[True], packed.doc[1:] != packed.doc[:-1], [True]])
    starts = np.flatnonzero(marked[1:-1] & (~marked[:-2] | cut[:-1]))
    ends = np.flatnonzero(marked[1:-1] & (~marked[2:] | cut[1:])) + 1
    return [(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True) if packed.position[a] > 0]


def acceptance(
    passes: Passes, features: Features, documents: Documents, ks: Sequence[int], tokens: int, flex: bool = False
) -> dict[int, list[Step]]:
    """The steps of every answer, for each K: one pass at the largest serves them all."""
    steps: dict[int, list[Step]] = {k: [] for k in ks}
    for chosen in fill(documents, np.arange(len(documents)), tokens) if len(documents) else ():
        one = packed_documents(documents, chosen, tokens)
        anchors, drafts = draft_everywhere(passes, features, one, max(ks), flex)
        for k in ks:
            steps[k] += walk(one, anchors, drafts, k)
    return steps


def length_of(steps: Iterable[Step]) -> float:
    """The acceptance length: 1 + accepted / drafts."""
    counts = [step.accepted for step in steps if step.drafted]
    return 1 + sum(counts) / len(counts) if counts else 1.0

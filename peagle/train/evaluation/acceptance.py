"""Acceptance length without decoding: all drafts at once, then a walk along the matches.

The target's answer is known. One pass drafts K tokens at every place of it; the step loop would visit only those places
it jumps to: from newest token n, a matches lead to newest token n + a + 1. Greedy answers give the greedy acceptance
length, sampled ones that of sampling, for a draft is kept iff it equals the target's own token (sampling.py). Behind
the end of an answer nothing is known: drafts there count as not accepted.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.core import Step
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.drafter.branching import Branching
from peagle.kernels.triton.build_tree import tree_topology
from peagle.train.data.attention_mask import mask_for
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import full_chains
from peagle.train.data.documents import Documents, fill
from peagle.train.data.documents import packed as packed_documents
from peagle.train.data.pack import Batch, Pack, batch_of
from peagle.train.features.features import AnyFeatures
from peagle.train.objective.gradients import run_level
from peagle.train.objective.passes import Passes

GROUP = 4096  # anchors that are drafted for at once
PIECE = 4096  # rows that have logits at once


def draft_everywhere(
    passes: Passes, features: AnyFeatures, packed: Pack, k: int, flex: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(anchors [A], drafts [A, k]): the drafts after every anchor whose newest token belongs to an answer."""
    found = [
        (own, drafts.cpu().numpy())
        for own, _, drafts in rows_everywhere(passes, features, packed, k, flex)
    ]
    anchors, drafts = (
        zip(*found, strict=True) if found else ([np.zeros(0, int)], [np.zeros((0, k), int)])
    )
    return np.concatenate(anchors), np.concatenate(drafts)


@torch.no_grad()
def rows_everywhere(
    passes: Passes, features: AnyFeatures, packed: Pack, k: int, flex: bool = False
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Group after group: (anchors [A], their rows' normed outputs [A, k, d], drafts [A, k])."""
    anchors = np.flatnonzero(
        np.append(packed.answer[1:] & (packed.doc[1:] == packed.doc[:-1]), False)
    )
    config, context = passes.drafter.config, None
    by_depth, block = config.method != "p-eagle", config.bidirectional
    group = min(GROUP, len(anchors))
    capacity = [group] * (k - 1) if by_depth else [group * (k - 1)]
    for start in range(0, len(anchors), max(group, 1)):
        own = anchors[start : start + group]
        batch = batch_of(
            packed, full_chains(own, k), by_depth, capacity=capacity, flex=flex, bidirectional=block
        )
        batch = flatten(batch).to(features.target.device)
        if context is None:
            mask = mask_for(batch.context, batch.context, flex, batch.blocks)
            context = passes("context", batch.next_ids, features(batch)[0], batch.position, mask)
        yield (own, *_rows(passes, batch, context, own, flex))


def _rows(
    passes: Passes, batch: Batch, context: Any, anchors: np.ndarray, flex: bool
) -> tuple[Tensor, Tensor]:
    """(normed [A, k, d], drafts [A, k]) of each anchor's rows; EAGLE-3 is fed its own drafts."""
    normed, feedback, cache = context
    by_depth = passes.drafter.config.method != "p-eagle"
    rows, seen = [normed[torch.from_numpy(anchors).to(normed.device)][:, None]], batch.context
    drafts = [drafts_of(passes.drafter, rows[0])] if by_depth else []
    for level in batch.segments[0].levels if batch.segments else ():
        seen = seen + level.rows
        ids = pad(drafts[-1][:, 0], len(level.rows)) if by_depth else None
        mask = mask_for(level.rows, seen, flex, level.blocks)
        out, feedback, cache = run_level(passes, level, feedback, cache, mask, ids)
        rows.append(out[: level.live].unflatten(0, (len(anchors), -1)))
        drafts += [drafts_of(passes.drafter, rows[-1])] if by_depth else []
    normed = torch.cat(rows, 1)
    return normed, torch.cat(drafts, 1) if by_depth else drafts_of(passes.drafter, normed)


def drafts_of(drafter: Drafter, normed: Tensor) -> Tensor:
    """In pieces: [rows, vocabulary] is large."""
    parts = normed.to(drafter.lm_head.dtype).split(max(1, PIECE // normed.shape[1]))
    return torch.cat([drafter.drafts(part) for part in parts])


def pad(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - len(x))])


def truth(packed: Pack, anchors: np.ndarray, k: int) -> np.ndarray:
    """[A, k]: the tokens that really follow each anchor's newest token; -1 behind the end of its answer."""
    size = len(packed.ids)
    place = anchors[:, None] + 2 + np.arange(k)  # draft i of anchor a guesses token a + 2 + i
    inside = np.minimum(place, size - 1)
    known = (
        (place < size)
        & packed.answer[inside]
        & (packed.doc[inside] == packed.doc[anchors][:, None])
    )
    return np.where(known, packed.ids[inside], -1)


def chain_matches(packed: Pack, anchors: np.ndarray, drafts: np.ndarray, k: int) -> np.ndarray:
    """[A]: how many of the first k drafts are right."""
    return np.cumprod(drafts[:, :k] == truth(packed, anchors, k), 1).sum(1)


def tree_matches(
    drafter: Drafter, branching: Branching, normed: Tensor, wanted: Tensor, tree: DraftShape
) -> Tensor:
    """normed [A, k, d], wanted [A, k] -> [A]: how deep the tree of these rows holds the tokens that follow."""
    found = []
    for part, own in zip(normed.split(PIECE // tree.k), wanted.split(PIECE // tree.k), strict=True):
        rows = part.flatten(0, 1).to(drafter.lm_head.dtype)
        ids, logp = branching(rows, drafter.logits(rows), tree.k)
        grown, each = (
            tree_topology(logp, tree.nodes),
            torch.arange(len(part), device=part.device)[:, None],
        )
        depth = grown.depths.long() - 1
        holds = drafter.target_token_ids(ids[each, depth, grown.candidates]) == own.gather(1, depth)
        good = 1 + (holds.long() << torch.arange(1, tree.nodes + 1, device=part.device)).sum(1)
        found.append(
            (grown.masks & ~good[:, None] == 0).sum(1) - 1
        )  # rows whose ancestors all hold: a path
    return torch.cat(found)


def walk(packed: Pack, anchors: np.ndarray, matches: np.ndarray, k: int) -> list[Step]:
    """The steps of decoding every answer of the pack with K = k, without the prefill's first token."""
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
    return [
        (a, b)
        for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
        if packed.position[a] > 0
    ]


def acceptance(
    passes: Passes,
    features: AnyFeatures,
    documents: Documents,
    ks: Sequence[int],
    tokens: int,
    flex: bool = False,
) -> dict[int, list[Step]]:
    """The steps of every answer, for each K: one pass at the largest serves them all, unless rows see later ones."""
    steps: dict[int, list[Step]] = {k: [] for k in ks}
    runs = [[k] for k in ks] if passes.drafter.config.bidirectional else [list(ks)]
    for chosen in fill(documents, np.arange(len(documents)), tokens) if len(documents) else ():
        one = packed_documents(documents, chosen, tokens)
        for run in runs:
            anchors, drafts = draft_everywhere(passes, features, one, max(run), flex)
            for k in run:
                steps[k] += walk(one, anchors, chain_matches(one, anchors, drafts, k), k)
    return steps


@torch.no_grad()
def tree_acceptance(
    passes: Passes,
    features: AnyFeatures,
    documents: Documents,
    trees: Sequence[DraftShape],
    tokens: int,
    flex: bool = False,
) -> dict[DraftShape, list[Step]]:
    """The same for trees."""
    steps: dict[DraftShape, list[Step]] = {tree: [] for tree in trees}
    branching = Branching(passes.drafter)
    for chosen in fill(documents, np.arange(len(documents)), tokens) if len(documents) else ():
        one = packed_documents(documents, chosen, tokens)
        for k in sorted({tree.k for tree in trees}):
            groups = list(rows_everywhere(passes, features, one, k, flex))
            if not groups:
                continue
            anchors = np.concatenate([own for own, _, _ in groups])
            wanted = [
                torch.from_numpy(truth(one, own, k)).to(normed.device) for own, normed, _ in groups
            ]
            for tree in (tree for tree in trees if tree.k == k):
                parts = [
                    tree_matches(passes.drafter, branching, group[1], own, tree)
                    for group, own in zip(groups, wanted, strict=True)
                ]
                steps[tree] += walk(one, anchors, torch.cat(parts).cpu().numpy(), k)
    return steps


def length_of(steps: Iterable[Step]) -> float:
    """The acceptance length: 1 + accepted / drafts."""
    counts = [step.accepted for step in steps if step.drafted]
    return 1 + sum(counts) / len(counts) if counts else 1.0

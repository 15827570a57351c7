"""The acceptance length without decoding: all drafts at once, then a replay of the steps.

The target's answer is known. One pass drafts K tokens at every anchor of it; the decoding loop
would visit only some of them: with newest token n and a accepted drafts, the next newest token is n
+ a + 1. A draft is accepted if and only if it equals the target's own token, so greedy answers give
the greedy acceptance length and sampled answers that of sampling. The tokens behind the end of an
answer are unknown: drafts there count as not accepted.

    answer x2..x7, K = 4; anchor 1 (newest token x2) drafts x3 x4 wrong x6, 2 of them accepted:
    the step yields x3 x4 x5, and the next anchor is 4 (newest token x5)
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from peagle.core import Step
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.drafter.branching import Branching
from peagle.kernels.triton.build_tree import tree_topology
from peagle.train.data.pack import PackedDocuments


def expected_tokens(packed: PackedDocuments, anchors: np.ndarray, k: int) -> np.ndarray:
    """The tokens after each anchor's newest token, [A, k]; -1 behind the end of its answer."""
    size = len(packed.ids)
    # Draft i of anchor a guesses token a + 2 + i.
    positions = anchors[:, None] + 2 + np.arange(k)
    clipped = np.minimum(positions, size - 1)
    same_doc = packed.doc[clipped] == packed.doc[anchors][:, None]
    known = (positions < size) & packed.answer_mask[clipped] & same_doc
    return np.where(known, packed.ids[clipped], -1)


def chain_matches(
    packed: PackedDocuments, anchors: np.ndarray, drafts: np.ndarray, k: int
) -> np.ndarray:
    """The number of accepted drafts among the first k of each anchor, [A]."""
    return np.cumprod(drafts[:, :k] == expected_tokens(packed, anchors, k), 1).sum(1)


def tree_matches(
    drafter: Drafter, branching: Branching, normed: Tensor, expected: Tensor, shape: DraftShape
) -> Tensor:
    """normed [A, k, d], expected [A, k] -> [A]: the number of accepted nodes of each tree."""
    rows = normed.flatten(0, 1).to(drafter.head_dtype)
    ids, log_probs = branching(rows, drafter.logits(rows), shape.k)
    return candidate_matches(drafter.target_token_ids(ids), log_probs, expected, shape)


def candidate_matches(
    tokens: Tensor, log_probs: Tensor, expected: Tensor, shape: DraftShape
) -> Tensor:
    """The same of trees from candidates: tokens [A, k, M], log_probs [A, k, 1 or M, M]."""
    tree = tree_topology(log_probs, shape.nodes)
    batch = torch.arange(len(tokens), device=tokens.device)[:, None]
    depth = tree.depths.long() - 1
    matches = tokens[batch, depth, tree.candidates] == expected.gather(1, depth)
    # Bit 0 is the root, bit i is node i. A node is accepted if its path of ancestors, itself
    # included, consists of matching nodes.
    bits = torch.arange(1, shape.nodes + 1, device=tokens.device)
    matching = 1 + (matches.long() << bits).sum(1)
    return (tree.masks & ~matching[:, None] == 0).sum(1) - 1


def replay_steps(
    packed: PackedDocuments, anchors: np.ndarray, matches: np.ndarray, k: int
) -> list[Step]:
    """The steps of decoding every answer of the pack with K = k, without the prefill's token."""
    by_document = replay_by_document(packed, anchors, matches, k)
    return [step for steps in by_document.values() for step in steps]


def replay_by_document(
    packed: PackedDocuments, anchors: np.ndarray, matches: np.ndarray, k: int
) -> dict[int, list[Step]]:
    """The steps of each document of the pack, by its number in the pack."""
    accepted_at = dict(zip(anchors.tolist(), matches.tolist(), strict=True))
    by_document: dict[int, list[Step]] = {}
    for start, end in answer_spans(packed):
        steps = by_document.setdefault(int(packed.doc[start]), [])
        newest = start
        while newest < end - 1:
            accepted = accepted_at[newest - 1]
            tokens = packed.ids[newest + 1 : min(newest + 2 + accepted, end)]
            steps.append(Step(tuple(tokens.tolist()), drafted=k, accepted=accepted))
            newest += accepted + 1
    return by_document


def answer_spans(packed: PackedDocuments) -> list[tuple[int, int]]:
    """[start, end) of every answer in the pack that follows a prompt."""
    mask = np.concatenate([[False], packed.answer_mask, [False]])
    boundary = np.concatenate([[True], packed.doc[1:] != packed.doc[:-1], [True]])
    starts = np.flatnonzero(mask[1:-1] & (~mask[:-2] | boundary[:-1]))
    ends = np.flatnonzero(mask[1:-1] & (~mask[2:] | boundary[1:])) + 1
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return [(start, end) for start, end in spans if packed.position[start] > 0]


def acceptance_length(steps: Iterable[Step]) -> float:
    """1 + accepted / drafts."""
    counts = [step.accepted for step in steps if step.drafted]
    return 1 + sum(counts) / len(counts) if counts else 1.0

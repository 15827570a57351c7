"""The acceptance of heads on the target's own answers, without decoding (evaluation/replay.py)."""

import math
from typing import NamedTuple

import numpy as np
import torch

from peagle.core import Step
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.evaluate.evaluate import summarize
from peagle.train.data.documents import Documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.features.features import FeatureSource
from peagle.train.objective.passes import DrafterPasses

K = 7
TREE = DraftShape(K, 31)
TREE_ANSWERS = 60  # of a set


def new_replay(drafter: Drafter, features: FeatureSource) -> DraftReplay:
    """Not compiled: that takes longer than what is measured here."""
    target = features.target
    cuda = target.device.type == "cuda"
    dtype = torch.float32 if target.dtype == torch.float32 else torch.bfloat16
    return DraftReplay(DrafterPasses(drafter, dtype), features, 16384 if cuda else 2048, cuda)


class Measured(NamedTuple):
    record: dict[str, float | int]  # answers and acceptance length
    counts: np.ndarray  # [answers, 2], drafts and accepted drafts


def measure_set(replay: DraftReplay, documents: Documents, tree: bool) -> Measured:
    """Chains on all answers, or trees of 31 nodes on some of them."""
    if tree:
        documents = some_answers(documents)
        steps = replay.tree_steps(documents, [TREE])[TREE]
        names = "tree answers", "tree 31"
    else:
        steps = replay.chain_steps(documents, [K])[K]
        names = "answers", f"K={K}"
    length = round(summarize(steps, K).acceptance_length, 4)
    record = dict(zip(names, (len(documents), length), strict=True))
    return Measured(record, answer_counts(steps, documents))


def some_answers(documents: Documents) -> Documents:
    """At most TREE_ANSWERS of them, evenly spread."""
    stride = max(1, math.ceil(len(documents) / TREE_ANSWERS))
    return documents.subset(np.arange(0, len(documents), stride))


def answer_counts(steps: list[Step], documents: Documents) -> np.ndarray:
    """Drafts and accepted drafts of each document, [documents, 2], from its replayed steps.

    The steps of a document yield all tokens of its answers but the first token of each.
    """
    counts = np.zeros((len(documents), 2), dtype=np.int64)
    remaining = iter(steps)
    for i in range(len(documents)):
        tokens = replayed_tokens(documents[i].answer_mask)
        while tokens > 0:
            step = next(remaining)
            counts[i] += (1, step.accepted)
            tokens -= len(step.tokens)
    assert next(remaining, None) is None, "steps are left: these are of other documents"
    return counts


def replayed_tokens(answer_mask: np.ndarray) -> int:
    """The tokens of answers that follow a prompt, without the first token of each answer."""
    starts = np.flatnonzero(answer_mask[1:] & ~answer_mask[:-1]) + 1
    begins_with_answer = int(np.argmin(answer_mask)) if answer_mask[0] else 0
    return int(answer_mask.sum()) - begins_with_answer - len(starts)

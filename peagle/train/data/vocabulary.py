"""The draft vocabulary: the tokens that the target writes most often."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.train.data.documents import Documents


class DraftVocabulary(NamedTuple):
    target_ids: Tensor | None  # [size] target ids, rising if chosen from answers; None: all tokens
    coverage: float  # fraction of the answers' tokens in it


def choose_draft_vocabulary(
    documents: Documents, vocab_size: int, size: int, always: frozenset[int] = frozenset()
) -> DraftVocabulary:
    """The `size` most frequent tokens of the answers; the stop tokens `always` are among them."""
    if not size or size >= vocab_size:
        return DraftVocabulary(None, 1.0)
    counts = np.bincount(documents.ids[documents.answer_mask], minlength=vocab_size)
    rank = counts.astype(np.float64)
    rank[list(always)] = np.inf
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])
    return DraftVocabulary(torch.from_numpy(ids), _coverage(counts, ids))


def given_draft_vocabulary(documents: Documents, target_ids: Tensor | None) -> DraftVocabulary:
    """The vocabulary of another drafter, over these documents."""
    if target_ids is None:
        return DraftVocabulary(None, 1.0)
    counts = np.bincount(documents.ids[documents.answer_mask], minlength=int(target_ids.max()) + 1)
    return DraftVocabulary(target_ids, _coverage(counts, target_ids.numpy()))


def _coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    return float(counts[ids].sum() / max(counts.sum(), 1))

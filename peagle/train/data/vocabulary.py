"""The draft vocabulary: the tokens the target really writes, and how much of its text they cover."""

import numpy as np
import torch
from torch import Tensor

from peagle.train.data.documents import Documents


def draft_vocabulary(
    documents: Documents, vocab_size: int, size: int, always: frozenset[int] = frozenset()
) -> tuple[Tensor | None, float]:
    """(target ids in rising order [size], share of the answers' tokens they cover); None: the whole vocabulary.

    `always`: stop tokens, which must be draftable.
    """
    if not size or size >= vocab_size:
        return None, 1.0
    counts = np.bincount(documents.ids[documents.answer], minlength=vocab_size)
    rank = counts.astype(np.float64)
    rank[list(always)] = np.inf
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])
    return torch.from_numpy(ids), float(counts[ids].sum() / max(counts.sum(), 1))

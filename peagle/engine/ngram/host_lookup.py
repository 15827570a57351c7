"""The lookup of peagle/engine/ngram/lookup.py on a CPU, in numpy.

A fixed number of operations over all positions suits a GPU. Here only the positions that still
match are compared, usually a few, and the call of an operation takes longer than its work.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.draft_shape import MAX_NGRAM, MIN_NGRAM
from peagle.engine.ngram.lookup import NgramMatches


def find_ngrams_on_host(
    tokens: Tensor, slots: list[int], newest: list[int], k: int
) -> NgramMatches:
    """`find_ngrams` for the rows `slots` of tokens [S, W]; newest: the position of the last one."""
    rows = tokens.numpy()
    lengths: list[int] = []
    drafts = np.empty((len(slots), k), np.int64)
    for i, (slot, position) in enumerate(zip(slots, newest, strict=True)):
        row = rows[slot, : position + 1]
        length, end = longest_match(row)
        lengths.append(length)
        following = row[end + 1 :]
        if len(following) < k:
            following = np.resize(following, k)  # Repeats it.
        drafts[i] = following[:k]
    return NgramMatches(torch.tensor(lengths, dtype=torch.int32), torch.from_numpy(drafts))


def longest_match(row: NDArray[np.int32]) -> tuple[int, int]:
    """The length of the longest match of the last tokens of a row, and the position of its end.

    (0, the position before the last): there is none.
    """
    last = len(row) - 1
    found = 0
    end = last - 1
    ends = np.flatnonzero(row[:last] == row[last])
    for length in range(1, MAX_NGRAM + 1):
        if not len(ends):
            break
        if length >= MIN_NGRAM:
            found = length
            end = int(ends[-1])
        if length > last:
            break
        ends = ends[ends >= length]
        ends = ends[row[ends - length] == row[last - length]]
    return found, end

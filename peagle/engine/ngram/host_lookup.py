"""The lookup of peagle/engine/ngram/lookup.py for one request on a CPU, in numpy.

A fixed number of operations over all positions suits a GPU. Here only the positions that still
match are compared, usually a few, and the call of an operation takes longer than its work.
"""

import numpy as np
from numpy.typing import NDArray

from peagle.draft_shape import MAX_NGRAM, MIN_NGRAM


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


def continuation(row: NDArray[np.int32], end: int, k: int) -> NDArray[np.int32]:
    """The k tokens behind position `end`; where the row ends, they start again."""
    following = row[end + 1 : end + 1 + k]
    return following if len(following) == k else np.resize(following, k)

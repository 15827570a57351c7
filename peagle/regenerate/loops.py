"""Answers that go round in circles: the same few tokens over and over. Nothing is learned from them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERIODS = range(1, 25)
TIMES = 4  # so often a period must come
TOKENS = 48  # and at least so many tokens in all
WINDOW = max(TOKENS, TIMES * max(PERIODS))  # a tail that shows every loop


def looping(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows [n, tokens] hold a period of 1 to 24 tokens at least 4 times in a row, over at least 48 tokens.

    "a b a b a b a b": token i equals token i - p in a run of (times - 1) * p. Fill short rows with `filled`.
    """
    found = np.zeros(len(rows), dtype=bool)
    for period in PERIODS:
        run = max(TOKENS, TIMES * period) - period
        if rows.shape[1] < run + period:
            continue
        same = np.zeros((len(rows), rows.shape[1] - period + 1), dtype=np.int32)
        np.cumsum(rows[:, period:] == rows[:, :-period], axis=1, out=same[:, 1:])
        found |= (same[:, run:] - same[:, :-run] == run).any(1)
    return found


def filled(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Rows of unequal length as one array; the filling is no token and never repeats."""
    width = max(map(len, rows), default=0)
    out = np.tile(-1 - np.arange(width, dtype=np.int64), (len(rows), 1))
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out


def is_looping(ids: Sequence[int]) -> bool:
    return bool(looping(filled([ids]))[0])


def repetitive(ids: Sequence[int], gram: int = 8, share: float = 0.7) -> bool:
    """Slow loops, which vary a little each time: too few of its runs of 8 tokens are different ones."""
    runs = [tuple(ids[i : i + gram]) for i in range(len(ids) - gram + 1)]
    return len(set(runs)) < share * len(runs)

"""Answers that repeat the same tokens over and over: a drafter learns nothing from them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERIODS = range(1, 25)  # tokens
MIN_REPEATS = 4
MIN_TOKENS = 48  # of all repeats together
WINDOW = max(MIN_TOKENS, MIN_REPEATS * max(PERIODS))  # a tail that is long enough for every loop


def find_loops(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows [n, tokens] repeat 1 to 24 tokens at least 4 times, over at least 48 tokens.

    In "a b a b a b a b", token i equals token i - 2 in a run of 3 * 2 tokens. Pad short rows with
    `pad_rows`.
    """
    loops = np.zeros(len(rows), dtype=bool)
    for period in PERIODS:
        run = max(MIN_TOKENS, MIN_REPEATS * period) - period
        if rows.shape[1] < run + period:
            continue
        equal = np.zeros((len(rows), rows.shape[1] - period + 1), dtype=np.int32)
        np.cumsum(rows[:, period:] == rows[:, :-period], axis=1, out=equal[:, 1:])
        loops |= (equal[:, run:] - equal[:, :-run] == run).any(1)
    return loops


def pad_rows(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Rows of unequal length as one array. The padding is no token and never repeats."""
    width = max(map(len, rows), default=0)
    padded = np.tile(-1 - np.arange(width, dtype=np.int64), (len(rows), 1))
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded


def is_looping(ids: Sequence[int]) -> bool:
    return bool(find_loops(pad_rows([ids]))[0])


def is_repetitive(ids: Sequence[int], gram: int = 8, min_unique: float = 0.7) -> bool:
    """Whether too few runs of 8 tokens differ: a loop with small variations."""
    runs = [tuple(ids[i : i + gram]) for i in range(len(ids) - gram + 1)]
    return len(set(runs)) < min_unique * len(runs)

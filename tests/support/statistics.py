"""Statistical tests of sampled tokens."""

from collections import Counter

import numpy as np
from scipy.stats import chisquare


def p_value(counts: Counter, exact: dict[tuple[int, ...], float], runs: int) -> float:
    """Chi-square; outcomes expected fewer than five times are pooled. Impossible outcomes fail outright."""
    assert all(exact[answer] > 0 for answer in counts), "an outcome of probability 0 occurred"
    common = [answer for answer, p in exact.items() if p * runs >= 5]
    observed = [counts[answer] for answer in common]
    expected = [exact[answer] * runs for answer in common]
    rest = runs - sum(observed), runs - sum(expected)
    if rest[1] > 1e-6 * runs:
        observed.append(rest[0])
        expected.append(rest[1])
    return float(chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue)

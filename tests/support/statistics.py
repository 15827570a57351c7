"""Statistical tests of sampled tokens."""

from collections import Counter

import numpy as np
from scipy.stats import chisquare


def p_value(counts: Counter, exact: dict[tuple[int, ...], float], runs: int) -> float:
    """The p-value of a chi-square test.

    Outcomes that are expected fewer than five times are pooled; impossible outcomes fail.
    """
    assert all(exact[answer] > 0 for answer in counts), "an outcome of probability 0 occurred"
    common = [answer for answer, p in exact.items() if p * runs >= 5]
    observed = [counts[answer] for answer in common]
    expected = [exact[answer] * runs for answer in common]
    rare_observed = runs - sum(observed)
    rare_expected = runs - sum(expected)
    if rare_expected > 1e-6 * runs:
        observed.append(rare_observed)
        expected.append(rare_expected)
    return float(chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue)

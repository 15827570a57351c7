"""Statistical tests of sampled tokens."""

from collections import Counter

import torch


def chi_square_p_value(observed: list[int], expected: list[float]) -> float:
    """The probability of a chi-square statistic at least this large, if `expected` is right."""
    counts, means = (torch.tensor(x, dtype=torch.float64) for x in (observed, expected))
    statistic = ((counts - means) ** 2 / means).sum()
    freedom = torch.tensor(len(observed) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


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
    factor = sum(observed) / sum(expected)
    return chi_square_p_value(observed, [count * factor for count in expected])

"""benchmarks/drafter/ranks.py: ranks of tokens among the candidates of a drafter."""

import numpy as np
import pytest
import torch

from benchmarks.drafter import ranks
from benchmarks.drafter.ranks import NO_CANDIDATE, UNKNOWN, SetRanks, rank_shares, token_ranks


def test_ranks_behind_the_expected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks depend on pairs of tokens: after candidate 20, token 41 is the best one at depth 2."""
    monkeypatch.setattr(ranks, "K", 2)
    tokens = torch.tensor([[[10, 20], [40, 41]]]).expand(4, -1, -1)
    logp = torch.tensor([[[[-0.1, -3.0]] * 2, [[-0.1, -3.0], [-3.0, -0.1]]]]).expand(4, -1, -1, -1)
    expected = torch.tensor([[10, 41], [20, 41], [30, 41], [20, -1]])
    assert token_ranks(tokens, logp, expected).tolist() == [
        [0, 1],
        [1, 0],
        [NO_CANDIDATE, UNKNOWN],
        [1, UNKNOWN],
    ]


def test_shares_of_ranks() -> None:
    sets = [np.array([0, 0, 1, 1, 2]), np.array([0, NO_CANDIDATE])]
    shares, total = rank_shares([SetRanks([], {}, own) for own in sets])
    assert shares[:3] == [0.5, 0.25, 0.0] and total == 4

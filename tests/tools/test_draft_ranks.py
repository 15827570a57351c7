"""benchmarks/draft_ranks.py: ranks behind the expected tokens; benchmarks/moe_run.py: its lines."""

import numpy as np
import pytest
import torch

from benchmarks import draft_ranks, moe_run
from benchmarks.draft_ranks import NO_CANDIDATE, UNKNOWN, SetRanks, rank_shares, token_ranks


def test_ranks_behind_the_expected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs: behind candidate 20, token 41 is the better one at depth 2."""
    monkeypatch.setattr(draft_ranks, "K", 2)
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
    ranks = [np.array([0, 0, 1, 1, 2]), np.array([0, NO_CANDIDATE])]
    shares, total = rank_shares([SetRanks([], {}, own) for own in ranks])
    assert shares[:3] == [0.5, 0.25, 0.0] and total == 4


def test_a_line_names_the_tree() -> None:
    cell = {
        "method": "p-eagle",
        "k": "auto",
        "tree": 31,
        "concurrency": 8,
        "tokens_per_second": 2500.0,
        "mean_tokens_per_second": 2400.0,
        "acceptance_length": 4.4,
        "step_ms": 10.0,
        "floor_ms": 8.0,
        "experts_touched": 31.0,
        "experts": 32,
    }
    line = moe_run.cell_line(cell)
    assert line.startswith(
        "p-eagle K=auto tree=31 c=8: 2,500 tokens/s (mean 2,400), AL 4.40, 10.00 ms"
    )
    assert "tree" not in moe_run.cell_line(cell | {"tree": 0})
    assert {"gpt-oss-20b-trees", "qwen3-30b-a3b-trees"} <= {x.name for x in moe_run.MEASUREMENTS}

"""Sampling is exact: joint distribution of three tokens, and equal answers with drafts."""

import itertools
from collections import Counter

import pytest
import torch

from peagle.core import Sampling
from peagle.errors import UserError
from peagle.reference.decode import decode
from peagle.reference.proposer import Verified, proposer_for
from peagle.reference.sampling_rule import accept, choose, probabilities, uniforms
from peagle.target import Target
from tests.support.engine.statistics import p_value
from tests.support.models.tiny_models import AUX, make_drafter, make_target

RUNS = 500
OPTIONS = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.1, "top_k": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}
PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def small() -> Target:
    """A target with two layers and a vocabulary of six: three tokens have 216 outcomes."""
    target = make_target("llama", seed=3, vocab_size=6, num_hidden_layers=2)
    target.model.lm_head.weight.data.mul_(0.5)  # makes the distribution less peaked
    return target


class GreedyProposer:
    """Proposes the greedy continuation of the target; `known` caches tokens over all runs."""

    def __init__(self, target: Target, known: dict[tuple[int, ...], int]) -> None:
        self.target = target
        self.known = known
        self.seen = PROMPT

    def propose(self, verified: Verified, k: int) -> torch.Tensor:
        kept = verified.ids[: len(verified.ids) - verified.rejected].tolist()
        self.seen = self.seen[: verified.first] + kept
        ids = self.seen + verified.newest.tolist()
        for _ in range(k):
            ids = [*ids, self.next(tuple(ids))]
        return torch.tensor(ids[-k:])

    def next(self, ids: tuple[int, ...]) -> int:
        if ids not in self.known:
            logits = self.target.forward(torch.tensor(ids), keep=1).logits
            self.known[ids] = int(logits.argmax())
        return self.known[ids]


def joint(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact probability of every possible answer of three tokens."""
    outcomes = {}
    for first, second in itertools.product(range(target.vocab_size), repeat=2):
        logits = target.forward(torch.tensor([*PROMPT, first, second])).logits[-3:]
        p = probabilities(logits, sampling).double()
        for third in range(target.vocab_size):
            outcomes[first, second, third] = float(p[0, first] * p[1, second] * p[2, third])
    return outcomes


def sample(target: Target, sampling: dict, runs: int, k: int = 2) -> tuple[Counter, int]:
    counts: Counter = Counter()
    accepted = 0
    known: dict[tuple[int, ...], int] = {}
    for seed in range(runs):
        proposer = GreedyProposer(target, known)
        steps = list(decode(target, proposer, PROMPT, k, 3, Sampling(**sampling, seed=seed)))
        counts[tuple(token for step in steps for token in step.tokens)] += 1
        accepted += sum(step.accepted for step in steps)
    return counts, accepted


@pytest.mark.parametrize(
    "option",
    [  # Acceptance sees only processed probabilities; "all" applies every kind of processing.
        pytest.param(
            option, id=name, marks=[] if name in ("temperature", "all") else pytest.mark.slow
        )
        for name, option in OPTIONS.items()
    ],
)
def test_speculative_sampling_has_the_distribution_of_the_target(
    small: Target, option: dict
) -> None:
    """Chi-square test at level 1e-3 over 500 answers; fixed seeds make it deterministic."""
    small.tap(())
    exact = joint(small, Sampling(**option))
    assert abs(sum(exact.values()) - 1) < 1e-5
    counts, accepted = sample(small, option, RUNS)
    assert accepted > RUNS / 10, "without accepted drafts the test would be meaningless"
    assert p_value(counts, exact, RUNS) > 1e-3


def test_the_chi_square_test_detects_a_faulty_rule(
    small: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that always accepts the first draft fails the test with as many answers."""
    small.tap(())
    exact = joint(small, Sampling(temperature=0.8))

    def generous(drafts: torch.Tensor, tokens: torch.Tensor) -> int:
        tokens[:1] = drafts[:1]
        return accept(drafts, tokens)

    monkeypatch.setattr("peagle.reference.decode.accept", generous)
    counts, _ = sample(small, OPTIONS["temperature"], RUNS)
    assert p_value(counts, exact, RUNS) < 1e-6


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_seed_gives_the_same_answer_with_and_without_speculation(
    target: Target, method, k: int, prompt
) -> None:
    drafter = make_drafter(target, method, 2 if method == "p-eagle" else 1)
    target.tap(AUX)
    for seed in range(4):
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed)
        answers = [
            [
                token
                for step in decode(target, proposer, prompt(9), k, 20, sampling)
                for token in step.tokens
            ]
            for proposer in (None, proposer_for(drafter))
        ]
        assert answers[0] == answers[1]


def test_rejection_sampling_with_one_hot_drafts() -> None:
    """P(keep draft x) = p(x); given a rejection, the token follows p without x, renormalized."""
    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    u = uniforms(0, 40_000)
    tokens = choose(p.log().expand(len(u), -1), Sampling(temperature=1.0), u)
    kept = tokens == 1
    assert abs(float(kept.float().mean()) - 0.5) < 0.01
    rest = torch.bincount(tokens[~kept], minlength=4) / (~kept).sum()
    torch.testing.assert_close(rest, torch.tensor([0.2, 0.0, 0.3, 0.5]), rtol=0, atol=0.015)


def test_accept_counts_the_leading_matches() -> None:
    t = torch.tensor
    assert accept(t([1, 2, 3]), t([1, 2, 3, 4])) == 3
    assert accept(t([1, 9, 3]), t([1, 2, 3, 4])) == 1
    assert accept(t([9, 2, 3]), t([1, 2, 3, 4])) == 0
    assert accept(t([], dtype=torch.long), t([7])) == 0


def test_impossible_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 3.0, -torch.inf]])
    for u in (0.0, 0.3, 0.999999, 1 - 2**-53):
        assert int(
            choose(logits, Sampling(temperature=1.0), torch.tensor([u], dtype=torch.float64))
        ) in (0, 2)


def test_uniforms_of_different_lengths_share_a_prefix() -> None:
    assert torch.equal(uniforms(4, 10), uniforms(4, 100)[:10])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": -3},
    ],
)
def test_invalid_settings_are_refused(bad: dict) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)

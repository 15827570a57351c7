"""Simulated engines: the chosen K costs at most 3 % more than the best fixed one, and follows load and text."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from peagle.engine.adaptive import Acceptance, AdaptiveK, Choice, FixedK
from peagle.engine.costs import Costs
from peagle.errors import UserError

CANDIDATES = (0, 1, 2, 3, 5, 7)
GOOD = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)  # reached and accepted, per position: vLLM's CI, Qwen3-8B
POOR = (0.40, 0.14, 0.04, 0.01, 0.0, 0.0, 0.0)
BAD = (0.0,) * 7
Cost = Callable[[int, int], float]


def gpu(batch: int, k: int) -> float:
    """Memory-bound at batch 1, where rows are nearly free; compute-bound at 64, where they are not. Milliseconds."""
    return 4 + 0.01 * batch + (0.35 + 0.03 * k + 0.002 * batch if k else 0) + 0.02 * max(0, batch * (k + 1) - 32)


def busy(batch: int, k: int) -> float:
    """A target that is compute-bound at once: no speculation pays at batch 64."""
    return 4 + 0.08 * batch * (k + 1) + (0.5 if k else 0)


def tokens(profile: tuple[float, ...], k: int) -> float:
    return 1 + sum(profile[:k])


def best(cost: Cost, batch: int, profile: tuple[float, ...]) -> int:
    return max(CANDIDATES, key=lambda k: tokens(profile, k) / cost(batch, k))


class Simulation:
    """Steps of an engine whose costs and acceptance are known: what was chosen, and what it costs in the mean.

    `ahead`: as the engine has it, a step verifies the drafts of the step before and drafts for the next one.
    """

    def __init__(
        self, policy: AdaptiveK | FixedK, cost: Cost, noise: float = 0.0, seed: int = 0, ahead: bool = True
    ) -> None:
        self.policy, self.cost, self.noise, self.random = policy, cost, noise, np.random.default_rng(seed)
        self.ahead, self.drafted = ahead, 0
        self.choices: list[Choice] = []

    def run(self, steps: int, batch: int, profile: tuple[float, ...]) -> float:
        """The time that the chosen Ks take in the mean, relative to the best fixed K for as many tokens."""
        spent = needed = 0.0
        k_best = best(self.cost, batch, profile)
        for _ in range(steps):
            choice = self.policy.choose(batch)
            self.choices.append(choice)
            k, self.drafted = self.drafted if self.ahead else choice.k, choice.k
            reached = self.random.random(batch)[:, None] < np.array(profile[:k])[None]  # nested: a prefix is accepted
            seconds = self._seconds(batch, k) if k == choice.k else None
            self.policy.observe(batch, k, seconds, reached.sum(1).tolist())
            spent += self.cost(batch, k)
            needed += self.cost(batch, k_best) * tokens(profile, k) / tokens(profile, k_best)
        return spent / needed

    def _seconds(self, batch: int, k: int) -> float:
        disturbed = 5.0 if self.noise and self.random.random() < 0.02 else 1.0
        return self.cost(batch, k) * float(self.random.lognormal(0, self.noise)) * disturbed

    def ks(self, last: int) -> list[int]:
        return [choice.k for choice in self.choices[-last:]]


def calibrated(cost: Cost) -> AdaptiveK:
    policy = AdaptiveK(CANDIDATES)
    policy.calibrate({(b, k): cost(b, k) for b in (1, 4, 16, 64) for k in CANDIDATES})
    return policy


@pytest.mark.parametrize("cost", [gpu, busy])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("profile", [GOOD, POOR, BAD], ids=["good", "poor", "bad"])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("known", [True, False], ids=["calibrated", "unknown costs"])
@pytest.mark.parametrize("ahead", [True, False])
def test_never_three_percent_slower_than_the_best_fixed_k(cost, noise, profile, batch, known, ahead: bool) -> None:
    simulation = Simulation(calibrated(cost) if known else AdaptiveK(CANDIDATES), cost, noise, ahead=ahead)
    simulation.run(60, batch, profile)
    assert simulation.run(1500, batch, profile) < 1.03


def test_the_simulation_tells_good_from_bad() -> None:
    """The best K differs from load to load, and a fixed one is far off somewhere."""
    assert [best(gpu, batch, GOOD) for batch in (1, 8, 64)] == [7, 5, 3] and best(busy, 64, POOR) == 0
    assert Simulation(FixedK(7), busy).run(10, 64, GOOD) > 1.4
    assert Simulation(FixedK(0), gpu).run(10, 1, GOOD) > 2.5


@pytest.mark.parametrize("known", [True, False], ids=["calibrated", "unknown costs"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_follows_the_load(known: bool, noise: float) -> None:
    simulation = Simulation(calibrated(gpu) if known else AdaptiveK(CANDIDATES), gpu, noise)
    for batch in (1, 64, 1, 16, 64, 3):
        simulation.run(40, batch, GOOD)
        assert simulation.run(300, batch, GOOD) < 1.04


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("cost", [gpu, busy])
def test_follows_the_text(cost: Cost, batch: int, seed: int) -> None:
    simulation = Simulation(calibrated(cost), cost, 0.05, seed)
    for profile in (GOOD, BAD, GOOD, POOR, GOOD):
        simulation.run(60, batch, profile)
        assert simulation.run(300, batch, profile) < 1.05


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_follows_costs_that_change_for_good(factor: float) -> None:
    """Drafting becomes dearer or cheaper than it was at the start: longer contexts, a slower machine."""

    def later(batch: int, k: int) -> float:
        return gpu(batch, 0) + factor * (gpu(batch, k) - gpu(batch, 0))

    simulation = Simulation(calibrated(gpu), gpu, 0.05)
    simulation.run(100, 16, GOOD)
    simulation.cost = later
    simulation.run(200, 16, GOOD)
    assert simulation.run(1000, 16, GOOD) < 1.04


def test_does_not_flap_and_explores_rarely() -> None:
    simulation = Simulation(calibrated(gpu), gpu, 0.05)
    simulation.run(1000, 64, GOOD)
    exploring = [choice.reason.startswith(("exploring", "measuring")) for choice in simulation.choices]
    assert sum(exploring) <= 0.05 * len(exploring)
    settled = [choice.k for choice, other in zip(simulation.choices, exploring, strict=True) if not other]
    assert sum(a != b for a, b in pairwise(settled)) < 25


def test_without_speculation_nothing_is_learned_about_acceptance() -> None:
    acceptance = Acceptance(7)
    for _ in range(100):
        acceptance.observe(1, 7, [3])
    before = acceptance.tokens()
    assert before[3] > 3.9 and before[7] < 4.2
    for _ in range(500):
        acceptance.observe(1, 0, [])
    assert acceptance.tokens()[1] == pytest.approx(before[1])
    for _ in range(4):  # old evidence weighs little by now
        acceptance.observe(1, 1, [0])
    assert acceptance.tokens()[1] < 1.4


def test_costs_are_read_off_lines() -> None:
    costs = Costs()
    assert costs.seconds(1, 3) is None
    for k in (0, 7):
        costs.add(1, k, 1 + 0.1 * k)
        costs.add(16, k, 3 + 0.2 * k)
    assert costs.seconds(1, 3) == pytest.approx(1.3)
    assert costs.seconds(8, 0) == pytest.approx(1 + 2 * 7 / 15)  # between two batch sizes
    assert costs.seconds(64, 7) == pytest.approx(4.4)  # beyond them: as the nearest
    costs.add(64, 0, 6.0)
    costs.add(64, 0, 6.0)
    own = costs.seconds(64, 0)
    assert costs.seconds(64, 7) == pytest.approx(own * 4.4 / 3)  # the nearest one's shape, at its own height
    assert [Costs.bucket(b) for b in (1, 2, 3, 4, 5, 6, 7, 9, 33, 48, 49, 64)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        12,
        48,
        48,
        64,
        64,
    ]


def test_a_disturbed_step_does_not_count() -> None:
    costs = Costs()
    for seconds in (1.0, 1.01, 0.99, 1.0, 50.0, 1.0, 60.0):
        costs.add(4, 2, seconds)
    assert costs.seconds(4, 2) == pytest.approx(1.0)


def test_choices_are_explained_and_repeatable() -> None:
    runs = [Simulation(calibrated(gpu), gpu, 0.05) for _ in range(2)]
    for simulation in runs:
        simulation.run(300, 8, GOOD)
    assert runs[0].choices == runs[1].choices
    choice = runs[0].policy.choose(8)
    assert set(choice.expected) == set(CANDIDATES) and choice.reason
    assert choice.expected[5] == pytest.approx(8 * tokens(GOOD, 5) / gpu(8, 5), rel=0.15)


def test_a_fixed_k_stays() -> None:
    simulation = Simulation(FixedK(3), gpu)
    simulation.run(5, 8, BAD)
    assert simulation.ks(5) == [3] * 5


def test_no_speculation_must_be_a_candidate() -> None:
    with pytest.raises(UserError, match="0"):
        AdaptiveK((1, 3))
    only = Simulation(AdaptiveK((0,)), gpu)
    only.run(10, 1, GOOD)
    only.run(10, 8, GOOD)
    assert only.ks(20) == [0] * 20

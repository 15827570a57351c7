"""Adaptive drafting of chains on simulated engines.

The chosen chains cost at most 3 % more than the best fixed one, and adapt to load and text.
"""

from itertools import pairwise, product
from typing import Any

import pytest

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.candidates import candidate_shapes
from peagle.engine.policy.draft_policy import FixedPolicy
from peagle.engine.policy.step_costs import StepCosts
from peagle.errors import UserError
from tests.support.engine.simulated import (
    BAD,
    GOOD,
    POOR,
    Cost,
    Simulation,
    busy,
    calibrated,
    chain,
    expected_rates,
    gpu,
    mixture,
)

CHAINS = candidate_shapes(7)
PROFILES = {"good": GOOD, "poor": POOR, "bad": BAD}
# (known costs, noise, steps planned ahead): every pair of values occurs.
PAIRWISE = [(True, 0.05, True), (False, 0.05, False), (True, 0.0, False), (False, 0.0, True)]


def simulated_loads() -> list[Any]:
    """Every load with one of PAIRWISE; `make test-slow` runs all combinations."""
    loads = product([gpu, busy, mixture], PROFILES, [1, 8, 64])
    settings = list(product([True, False], [0.0, 0.05], [True, False]))
    return [
        pytest.param(*load, *values, marks=[] if values == PAIRWISE[i % 4] else pytest.mark.slow)
        for i, load in enumerate(loads)
        for values in settings
    ]


@pytest.mark.parametrize(("cost", "profile", "batch", "known", "noise", "ahead"), simulated_loads())
def test_at_most_three_percent_slower_than_the_best_fixed_k(
    cost: Cost, profile: str, batch: int, known: bool, noise: float, ahead: bool
) -> None:
    policy = calibrated(cost, CHAINS) if known else AdaptivePolicy(CHAINS)
    simulation = Simulation(policy, cost, CHAINS, noise, ahead=ahead)
    simulation.run(60, batch, PROFILES[profile])
    assert simulation.run(1500, batch, PROFILES[profile]) < 1.03


def test_the_simulation_distinguishes_shapes() -> None:
    """The best K depends on the load, and every fixed K is bad for some load."""
    seven = Simulation(FixedPolicy(chain(7)), busy, CHAINS)
    no_draft = Simulation(FixedPolicy(NO_DRAFT), gpu, CHAINS)
    assert [no_draft.best(batch, GOOD).k for batch in (1, 8, 64)] == [7, 5, 3]
    assert seven.best(64, POOR) == NO_DRAFT
    assert seven.run(10, 64, GOOD) > 1.4
    experts = Simulation(FixedPolicy(chain(7)), mixture, CHAINS)
    assert [experts.best(batch, GOOD).k for batch in (1, 8, 64)] == [3, 7, 5]
    assert [experts.best(batch, POOR).k for batch in (1, 8, 64)] == [0, 0, 2]
    assert experts.run(10, 1, POOR) > 1.9
    assert no_draft.run(10, 1, GOOD) > 2.5


@pytest.mark.parametrize(
    ("known", "noise"),
    [
        pytest.param(True, 0.05, id="calibrated"),
        pytest.param(False, 0.0, id="unknown costs"),
        pytest.param(True, 0.0, marks=pytest.mark.slow, id="calibrated, no noise"),
        pytest.param(False, 0.05, marks=pytest.mark.slow, id="unknown costs, noise"),
    ],
)
def test_adapts_to_the_load(known: bool, noise: float) -> None:
    simulation = Simulation(
        calibrated(gpu, CHAINS) if known else AdaptivePolicy(CHAINS), gpu, CHAINS, noise
    )
    for batch in (1, 64, 1, 16, 64, 3):
        simulation.run(40, batch, GOOD)
        assert simulation.run(300, batch, GOOD) < 1.04


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("cost", [gpu, busy])
def test_adapts_to_the_text(cost: Cost, batch: int, seed: int) -> None:
    simulation = Simulation(calibrated(cost, CHAINS), cost, CHAINS, 0.05, seed)
    for profile in (GOOD, BAD, GOOD, POOR, GOOD):
        simulation.run(60, batch, profile)
        assert simulation.run(300, batch, profile) < 1.05


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_mixture_is_never_slower_than_without_drafts(batch: int, seed: int) -> None:
    """For any text. Drafts of a single request are expensive, so they are resumed late."""
    simulation = Simulation(calibrated(mixture, CHAINS), mixture, CHAINS, 0.05, seed)
    for profile in (GOOD, BAD, GOOD, POOR, GOOD):
        simulation.run(60, batch, profile)
        slower_than_best = simulation.run(300, batch, profile)
        best = simulation.best(batch, profile)
        best_rate = simulation.tokens(profile, best) / mixture(batch, best)
        assert slower_than_best < 1.1
        assert slower_than_best / mixture(batch, NO_DRAFT) < 1.03 * best_rate


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_adapts_to_permanent_changes_of_costs(factor: float) -> None:
    """Costs of drafting change permanently, as with longer contexts or a slower machine."""

    def later(batch: int, shape: DraftShape) -> float:
        return gpu(batch, NO_DRAFT) + factor * (gpu(batch, shape) - gpu(batch, NO_DRAFT))

    simulation = Simulation(calibrated(gpu, CHAINS), gpu, CHAINS, 0.05)
    simulation.run(100, 16, GOOD)
    simulation.cost = later
    simulation.run(200, 16, GOOD)
    assert simulation.run(1000, 16, GOOD) < 1.04


def test_corrects_a_flat_calibration() -> None:
    """Random rows of a calibration touch all experts of a mixture; rows of text do not."""

    def saturated(batch: int, shape: DraftShape) -> float:
        return 10 if shape.k else 8

    def real(batch: int, shape: DraftShape) -> float:
        return 8 + 0.3 * shape.nodes

    chains = candidate_shapes(11)
    profile = (*GOOD, 0.0, 0.0, 0.0, 0.0)
    simulation = Simulation(calibrated(saturated, chains), real, chains)
    simulation.run(20, 8, profile)
    assert simulation.last(1) == [chain(11)] and simulation.best(8, profile) == chain(5)
    simulation.run(30, 8, profile)
    assert simulation.run(100, 8, profile) < 1.03


def test_does_not_oscillate_and_explores_rarely() -> None:
    simulation = Simulation(calibrated(gpu, CHAINS), gpu, CHAINS, 0.05)
    simulation.run(1000, 64, GOOD)
    exploring = [
        choice.reason.startswith(("exploring", "measuring")) for choice in simulation.choices
    ]
    assert sum(exploring) <= 0.08 * len(exploring)
    settled = [
        choice.shape
        for choice, other in zip(simulation.choices, exploring, strict=True)
        if not other
    ]
    assert sum(a != b for a, b in pairwise(settled)) < 25


def test_costs_are_interpolated() -> None:
    costs = StepCosts()
    assert costs.seconds(1, 3) is None
    for k in (0, 7):
        costs.add(1, k, 1 + 0.1 * k)
        costs.add(16, k, 3 + 0.2 * k)
    assert costs.seconds(1, 3) == pytest.approx(1.3)
    assert costs.seconds(8, 0) == pytest.approx(1 + 2 * 7 / 15)  # Between two batch sizes.
    # Beyond them, the cost of the nearest batch size.
    assert costs.seconds(64, 7) == pytest.approx(4.4)
    costs.add(64, 0, 6.0)
    costs.add(64, 0, 6.0)
    own = costs.seconds(64, 0)
    # The slope is that of the nearest bucket, at the level of this one.
    assert costs.seconds(64, 7) == pytest.approx(own * 4.4 / 3)
    batches = (1, 2, 3, 4, 5, 6, 7, 9, 33, 48, 49, 64)
    buckets = (1, 2, 3, 4, 6, 6, 8, 12, 48, 48, 64, 64)
    assert tuple(StepCosts.bucket(batch) for batch in batches) == buckets


def test_costs_of_the_device_alone_give_the_slope() -> None:
    costs = StepCosts()
    for batch in (1, 4):
        for k in (0, 3, 7):
            costs.calibrate(batch, k, batch * (1 + 0.1 * k))
    assert costs.seconds(4, 7) == pytest.approx(6.8)
    assert costs.seconds(2, 3) == pytest.approx(2.6)  # between two batch sizes
    costs.add(4, 3, 7.8)  # 1.5 times the time of the device.
    assert [costs.seconds(4, k) for k in (0, 3, 7)] == pytest.approx([6.0, 7.8, 10.2])
    assert costs.seconds(1, 0) == pytest.approx(1.0)


def test_outliers_do_not_count() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.01, 0.99, 1.0, 50.0, 1.0, 60.0):
        costs.add(4, 2, seconds)
    assert costs.seconds(4, 2) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cost", "batch"),
    [
        (gpu, 64),
        (busy, 8),
        pytest.param(gpu, 8, marks=pytest.mark.slow),
        pytest.param(busy, 64, marks=pytest.mark.slow),
    ],
)
def test_a_slow_first_step_does_not_exclude_a_shape(cost: Cost, batch: int) -> None:
    simulation = Simulation(calibrated(cost, CHAINS), cost, CHAINS)
    best = simulation.best(batch, GOOD)
    disturbed = []

    def seconds(batch: int, shape: DraftShape) -> float:
        if shape == best and not disturbed:
            disturbed.append(shape)
            return 5 * cost(batch, shape)
        return cost(batch, shape)

    simulation.seconds = seconds  # type: ignore[method-assign]
    assert simulation.run(3000, batch, GOOD) < 1.03 and disturbed


def test_choices_are_explained_and_reproducible() -> None:
    runs = [Simulation(calibrated(gpu, CHAINS), gpu, CHAINS, 0.05) for _ in range(2)]
    for simulation in runs:
        simulation.run(300, 8, GOOD)
    assert runs[0].choices == runs[1].choices and runs[0].rates == runs[1].rates
    choice = runs[0].policy.choose(8)
    rates = expected_rates(runs[0].policy, 8)
    assert set(rates) == set(CHAINS) and choice.reason
    rate = 8 * runs[0].tokens(GOOD, chain(5)) / gpu(8, chain(5))
    assert rates[chain(5)] == pytest.approx(rate, rel=0.15)


def test_a_fixed_shape_stays() -> None:
    for shape in (chain(3), DraftShape(7, 32)):
        simulation = Simulation(FixedPolicy(shape), gpu, CHAINS)
        simulation.run(5, 8, BAD)
        assert simulation.last(5) == [shape] * 5


def test_no_speculation_must_be_a_candidate() -> None:
    with pytest.raises(UserError, match="K=0"):
        AdaptivePolicy((chain(1), chain(3)))
    only = Simulation(AdaptivePolicy((NO_DRAFT,)), gpu, CHAINS)
    only.run(10, 1, GOOD)
    only.run(10, 8, GOOD)
    assert only.last(20) == [NO_DRAFT] * 20

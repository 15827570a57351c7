"""Adaptive drafting of trees on simulated engines.

The policy is at most a few percent slower than the best fixed shape, also as the load changes.
"""

from statistics import mean

import pytest

from peagle.draft_shape import MAX_TREE_NODES, NO_DRAFT, DraftShape
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.candidates import candidate_shapes
from peagle.engine.policy.draft_policy import FixedPolicy
from peagle.errors import UserError
from tests.support.engine.simulated import (
    BAD,
    GOOD,
    LONG,
    POOR,
    Cost,
    RequestSimulation,
    Simulation,
    busy,
    calibrated,
    chain,
    expected_rates,
    gpu,
)

SHAPES = candidate_shapes(7, 31)
DEEP = candidate_shapes(11, 31)
SEEDS = range(3)


def simulations(
    cost: Cost, known: bool, width: float = 0.4, among: tuple[DraftShape, ...] = SHAPES
) -> list[Simulation]:
    policies = [calibrated(cost, among) if known else AdaptivePolicy(among) for _ in SEEDS]
    return [
        Simulation(policy, cost, among, 0.05, seed, width=width)
        for policy, seed in zip(policies, SEEDS, strict=True)
    ]


def test_candidate_shapes() -> None:
    assert candidate_shapes(7) == tuple(chain(k) for k in (0, 1, 2, 3, 5, 7))
    assert candidate_shapes(4)[-1] == chain(4)
    assert candidate_shapes(7, 31) == (*candidate_shapes(7), DraftShape(7, 15), DraftShape(7, 31))
    sizes = {
        tree: [shape.nodes for shape in candidate_shapes(7, tree) if not shape.is_chain]
        for tree in (0, 12, 32, 40, MAX_TREE_NODES)
    }
    assert sizes == {
        0: [],
        12: [12],
        32: [15, 32],
        40: [15, 31, 40],
        MAX_TREE_NODES: [15, 31, MAX_TREE_NODES],
    }
    assert [shape.nodes for shape in candidate_shapes(20, 32) if not shape.is_chain] == [32]
    with pytest.raises(UserError, match="more nodes than K"):
        candidate_shapes(7, 6)


def test_each_load_has_another_best_shape() -> None:
    """Trees are best if rows are nearly free, chains if not, and no drafts if compute-bound."""
    memory_bound = Simulation(FixedPolicy(NO_DRAFT), gpu, SHAPES)
    compute_bound = Simulation(FixedPolicy(NO_DRAFT), busy, SHAPES)
    assert [memory_bound.best(batch, GOOD) for batch in (1, 8)] == [DraftShape(7, 31), chain(5)]
    assert compute_bound.best(64, POOR) == NO_DRAFT
    assert Simulation(FixedPolicy(chain(7)), gpu, SHAPES).run(10, 1, GOOD) > 1.4
    assert Simulation(FixedPolicy(DraftShape(7, 31)), gpu, SHAPES).run(10, 64, GOOD) > 2


LOADS: list[tuple[Cost, int, tuple[float, ...], float]] = [
    (gpu, 1, GOOD, 0.4),
    (busy, 1, GOOD, 0.2),
    (gpu, 1, BAD, 0.4),
    (gpu, 8, GOOD, 0.4),
    (busy, 8, POOR, 0.2),
    (busy, 64, BAD, 0.2),
    (gpu, 1, LONG, 0.3),
    # The rest runs in `make test-slow`.
    (busy, 1, LONG, 0.4),
    (gpu, 1, GOOD, 0.2),
    (busy, 1, POOR, 0.4),
    (gpu, 64, GOOD, 0.4),
    (busy, 64, POOR, 0.4),
    (busy, 1, GOOD, 0.4),
    (gpu, 8, LONG, 0.4),
    (busy, 8, LONG, 0.3),
]
FAST_LOADS = 7


@pytest.mark.parametrize(
    ("cost", "batch", "profile", "width", "known"),
    [
        # Every other load has known costs; `make test-slow` runs the other half.
        pytest.param(
            *load,
            known,
            marks=[] if i < FAST_LOADS and known == (i % 2 == 0) else pytest.mark.slow,
        )
        for i, load in enumerate(LOADS)
        for known in (True, False)
    ],
)
def test_at_most_a_few_percent_slower_than_the_best_fixed_shape(
    cost: Cost, batch: int, profile, width: float, known: bool
) -> None:
    ratios = []
    for simulation in simulations(cost, known, width, DEEP if len(profile) > 7 else SHAPES):
        simulation.run(60, batch, profile)
        ratios.append(simulation.run(1500, batch, profile))
    assert mean(ratios) < 1.035 and max(ratios) < 1.05


@pytest.mark.parametrize(
    ("cost", "known"),
    [
        (gpu, True),
        pytest.param(busy, False, marks=pytest.mark.slow),
        pytest.param(gpu, False, marks=pytest.mark.slow),
        pytest.param(busy, True, marks=pytest.mark.slow),
    ],
)
def test_adapts_to_the_load_with_trees_chains_and_no_drafts(cost: Cost, known: bool) -> None:
    ratios: dict[int, list[float]] = {1: [], 8: [], 64: []}
    chosen = set()
    for simulation in simulations(cost, known):
        for batch in (1, 8, 64, 1, 64, 8, 1):
            profile = POOR if batch == 64 else GOOD
            simulation.run(60, batch, profile)
            ratios[batch].append(simulation.run(600, batch, profile))
            chosen.add((batch, simulation.policy.best_shape))
    assert max(mean(of) for of in ratios.values()) < 1.03
    assert (1, DraftShape(7, 31)) in chosen
    assert (64, NO_DRAFT if cost is busy else chain(1)) in chosen


def test_adapts_to_the_text() -> None:
    """Trees are used again after text in which no draft is accepted."""
    for simulation in simulations(gpu, known=True):
        for profile in (GOOD, BAD, GOOD):
            simulation.run(300, 1, profile)
            assert simulation.run(300, 1, profile) < 1.06


def test_exploration_costs_little() -> None:
    """If drafts are far too expensive, large trees are not explored."""
    [simulation, *_] = simulations(busy, known=True)
    simulation.run(100, 64, BAD)
    assert simulation.run(2000, 64, BAD) < 1.015
    assert all(shape.is_chain for shape in simulation.last(2000))


def test_choices_are_reproducible() -> None:
    first = simulations(gpu, known=False)[0]
    second = simulations(gpu, known=False)[0]
    for simulation in (first, second):
        simulation.run(400, 1, GOOD)
    assert first.choices == second.choices and first.rates == second.rates
    assert set(first.rates[-1]) == set(SHAPES)


def test_draft_confidence_overrides_recent_acceptance() -> None:
    [simulation, *_] = simulations(busy, known=True)
    simulation.run(400, 8, GOOD)
    policy = simulation.policy
    best = []
    for draft_confidence in (None, [0.02] * 7, [0.99] * 7):
        policy.choose(8, draft_confidence)
        rates = expected_rates(policy, 8)
        best.append(max(rates, key=rates.__getitem__))
    assert best[1:] == [NO_DRAFT, chain(7)] and best[0] not in best[1:]


@pytest.mark.parametrize(
    ("cost", "users", "requests"),
    [
        (gpu, 8, 128),
        (busy, 8, 128),
        (gpu, 64, 512),
        pytest.param(busy, 64, 512, marks=pytest.mark.slow),
    ],
)
def test_requests_that_come_and_go_cost_no_more_than_three_percent(
    cost: Cost, users: int, requests: int
) -> None:
    """With 64 users most steps have a prefill and are not timed; calibration lacks host time."""

    def device_seconds(batch: int, shape: DraftShape) -> float:
        return 0.6 * cost(batch, shape)

    fixed = max(
        RequestSimulation(FixedPolicy(shape), cost, DEEP, LONG).run(requests, users)
        for shape in DEEP
    )
    rates = []
    for seed in SEEDS:
        served = RequestSimulation(calibrated(device_seconds, DEEP), cost, DEEP, LONG, seed)
        rates += [served.run(requests, users) for _ in range(2)]
    assert mean(rates) > 0.97 * fixed


def test_nothing_is_explored_in_steps_that_are_not_timed() -> None:
    """A step with a prefill is not timed: the policy neither explores nor measures in it."""
    policy = AdaptivePolicy(DEEP)
    assert [policy.choose(8, timed=timed).shape for timed in (False, True)] == [chain(3), chain(0)]
    assert AdaptivePolicy(candidate_shapes(3, 31)).choose(8, timed=False).shape == chain(3)
    known = calibrated(gpu, DEEP)
    for _ in range(300):
        choice = known.choose(8, timed=False)
        assert not choice.reason.startswith("exploring")
        known.observe(8, choice.shape, None, [AcceptedCounts(0, 0)] * 8)

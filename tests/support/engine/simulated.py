"""A simulated engine with known costs and acceptance, for tests of adaptive drafting."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from peagle.draft_shape import DraftShape
from peagle.engine.batch import verifiable_shape
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.draft_policy import DraftChoice, DraftPolicy

Cost = Callable[[int, DraftShape], float]
# Per position of a chain: the probability that the draft is reached and accepted.
Profile = tuple[float, ...]

GOOD: Profile = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)  # vLLM's CI, Qwen3-8B
LONG: Profile = (*GOOD, 0.03, 0.02, 0.01, 0.005)
POOR: Profile = (0.40, 0.14, 0.04, 0.01, 0.0, 0.0, 0.0)
BAD: Profile = (0.0,) * 7


def chain(k: int) -> DraftShape:
    return DraftShape(k, k)


def gpu(batch: int, shape: DraftShape) -> float:
    """Milliseconds of a step that is memory-bound at batch 1 and compute-bound at batch 64.

    A tree takes longer than its rows, because it is built, and the accepted path is moved.
    """
    drafting = 0.35 + 0.03 * shape.k + 0.002 * batch if shape.k else 0
    building = 0 if shape.is_chain else 0.15
    return 4 + 0.01 * batch + drafting + building + 0.02 * max(0, batch * (shape.nodes + 1) - 32)


def busy(batch: int, shape: DraftShape) -> float:
    """A target that is compute-bound at any batch size; at batch 64, no speculation is best."""
    return 4 + 0.08 * batch * (shape.nodes + 1) + (0.5 if shape.k else 0)


def mixture(batch: int, shape: DraftShape) -> float:
    """Milliseconds of a step that reads the experts that its rows choose, about Qwen3-30B-A3B's.

    T rows with k of E experts each touch E (1 - (1 - k / E)^T): 8 of 128 with one row, 52 with 8
    rows and 126 with 64. So each row of a draft is as expensive as another request, until a batch
    touches all experts.
    """
    rows = batch * (shape.nodes + 1)
    share_read = 1 - (1 - 8 / 128) ** rows
    drafting = 0.35 + 0.03 * shape.k + 0.002 * batch if shape.k else 0
    return 1.5 + 14 * share_read + 0.01 * rows + drafting


@cache
def acceptance_rates(profile: Profile, shape: DraftShape, width: float) -> np.ndarray:
    """The acceptance rate at each depth, given those before.

    At each depth a tree has (nodes / depth) ** width independent chances, a chain has one.
    """
    rates = np.array(profile[: shape.k]) / np.array((1.0, *profile))[: shape.k].clip(1e-9)
    return rates if shape.is_chain else 1 - (1 - rates) ** (shape.nodes / shape.k) ** width


@cache
def expected_tokens(profile: Profile, shape: DraftShape, width: float) -> float:
    """Expected tokens per step."""
    return 1 + float(np.cumprod(acceptance_rates(profile, shape, width)).sum())


def expected_rates(policy: AdaptivePolicy, batch: int) -> dict[DraftShape, float]:
    """Tokens per second of the whole batch by shape, as the policy's last choice estimated them."""
    return {
        shape: batch * policy.tokens[shape] / seconds for shape, seconds in policy.seconds.items()
    }


class Simulation:
    """Simulated steps of an engine: the choices of a policy, and their mean cost.

    `ahead`: as in the engine, a step verifies the drafts of the previous step and drafts for the
    next one. `width`: the advantage of trees.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        cost: Cost,
        shapes: Sequence[DraftShape],
        noise: float = 0.0,
        seed: int = 0,
        ahead: bool = True,
        width: float = 0.4,
    ) -> None:
        self.policy = policy
        self.cost = cost
        self.shapes = shapes
        self.noise = noise
        self.random = np.random.default_rng(seed)
        self.ahead = ahead
        self.width = width
        self.drafted = chain(0)
        self.choices: list[DraftChoice] = []
        self.rates: list[dict[DraftShape, float]] = []  # Rates of an AdaptivePolicy at each choice.

    def tokens(self, profile: Profile, shape: DraftShape) -> float:
        return expected_tokens(profile, shape, self.width)

    def best(self, batch: int, profile: Profile) -> DraftShape:
        return max(
            self.shapes, key=lambda shape: self.tokens(profile, shape) / self.cost(batch, shape)
        )

    def run(self, steps: int, batch: int, profile: Profile) -> float:
        """The mean time of the chosen shapes, relative to the best fixed one for as many tokens."""
        elapsed = needed = 0.0
        best = self.best(batch, profile)
        for _ in range(steps):
            choice = self.policy.choose(batch)
            self.choices.append(choice)
            if isinstance(self.policy, AdaptivePolicy):
                self.rates.append(expected_rates(self.policy, batch))
            shape = choice.shape
            if self.ahead:
                shape = verifiable_shape(choice.shape, [self.drafted])
            self.drafted = choice.shape if shape == choice.shape else self.shapes[-1]
            seconds = self.seconds(batch, shape) if shape == self.drafted else None
            self.policy.observe(batch, shape, seconds, self.accepted(batch, shape, profile))
            elapsed += self.cost(batch, shape)
            needed += (
                self.cost(batch, best) * self.tokens(profile, shape) / self.tokens(profile, best)
            )
        return elapsed / needed

    def accepted(self, batch: int, shape: DraftShape, profile: Profile) -> list[AcceptedCounts]:
        """Random outcomes; a larger shape accepts at least what a smaller one does."""
        rng = self.random.random((batch, shape.k))
        trees = [
            tree
            for tree in self.shapes
            if not tree.is_chain and tree.k == shape.k and tree.nodes <= shape.nodes
        ]
        counts = [
            leading(rng < acceptance_rates(profile, other, self.width)).tolist()
            for other in (shape, chain(shape.k), *trees)
        ]
        nodes = tuple(tree.nodes for tree in trees)
        return [accepted_counts(nodes, *each) for each in zip(*counts, strict=True)]

    def seconds(self, batch: int, shape: DraftShape) -> float:
        disturbed = 5.0 if self.noise and self.random.random() < 0.02 else 1.0
        return self.cost(batch, shape) * float(self.random.lognormal(0, self.noise)) * disturbed

    def last(self, count: int) -> list[DraftShape]:
        return [choice.shape for choice in self.choices[-count:]]


class RequestSimulation:
    """Simulated steps of an engine whose requests arrive and end.

    A waiting request replaces one that ends; the step with its prefill is not timed. At the end,
    the batch shrinks to zero.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        cost: Cost,
        shapes: Sequence[DraftShape],
        profile: Profile,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.cost = cost
        self.shapes = shapes
        self.profile = profile
        self.simulation = Simulation(policy, cost, shapes, 0.05, seed)

    def run(self, requests: int, users: int, length: int = 180) -> float:
        """Tokens per second."""
        random = np.random.default_rng(0)
        waiting = [int(n) for n in np.minimum(2 * length, random.geometric(1 / length, requests))]
        total = sum(waiting)
        elapsed = 0.0
        left: list[int] = []
        drafted: list[DraftShape] = []
        while waiting or left:
            joining = min(users - len(left), len(waiting))
            left += [waiting.pop() for _ in range(joining)]
            drafted += [self.shapes[-1]] * joining
            batch = len(left)
            chosen = self.policy.choose(batch, timed=not joining).shape
            shape = verifiable_shape(chosen, drafted)
            draft_shape = chosen if shape == chosen else self.shapes[-1]
            accepted = self.simulation.accepted(batch, shape, self.profile)
            timed = shape == draft_shape and not joining
            seconds = self.simulation.seconds(batch, shape) if timed else None
            self.policy.observe(batch, shape, seconds, accepted)
            elapsed += self.cost(batch, shape) + (0.5 if joining else 0.0)
            after = [n - each.accepted - 1 for n, each in zip(left, accepted, strict=True)]
            left = [n for n in after if n > 0]
            drafted = [draft_shape] * len(left)
        return total / elapsed


def leading(accepted: np.ndarray) -> np.ndarray:
    """The number of leading True values of each row."""
    return np.cumprod(accepted, axis=1).sum(1)


@cache
def accepted_counts(
    nodes: tuple[int, ...], by_shape: int, by_chain: int, *by_tree: int
) -> AcceptedCounts:
    """What one step accepted; `nodes`: the sizes of the trees among the shapes."""
    return AcceptedCounts(by_shape, by_chain, path([*zip(nodes, by_tree, strict=True)]))


def path(accepted_by_nodes: Sequence[tuple[int, int]]) -> int:
    """The bits of a path of which a tree of `nodes` accepts `rows`, for each (nodes, rows)."""
    rows = {0}
    last = before = 0
    for nodes, count in accepted_by_nodes:
        rows |= {last + 1 + i for i in range(count - before)}
        last, before = nodes, count
    return sum(1 << row for row in rows)


def calibrated(cost: Cost, shapes: Sequence[DraftShape]) -> AdaptivePolicy:
    policy = AdaptivePolicy(shapes)
    policy.calibrate(
        {(batch, shape): cost(batch, shape) for batch in (1, 4, 16, 64) for shape in shapes}
    )
    return policy

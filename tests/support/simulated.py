"""A simulated engine whose costs and acceptance are known: for tests of what it chooses to draft."""

from collections.abc import Callable, Sequence

import numpy as np

from peagle.draft_shape import DraftShape
from peagle.engine.batch import verifiable_shape
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.adaptive import AdaptivePolicy, DraftChoice, DraftPolicy

Cost = Callable[[int, DraftShape], float]
Profile = tuple[float, ...]  # of a chain's drafts: reached and accepted, per position

GOOD: Profile = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)  # vLLM's CI, Qwen3-8B
LONG: Profile = (*GOOD, 0.03, 0.02, 0.01, 0.005)
POOR: Profile = (0.40, 0.14, 0.04, 0.01, 0.0, 0.0, 0.0)
BAD: Profile = (0.0,) * 7


def chain(k: int) -> DraftShape:
    return DraftShape(k, k)


def gpu(batch: int, form: DraftShape) -> float:
    """Memory-bound at batch 1, where rows are nearly free; compute-bound at 64, where they are not. Milliseconds.

    A tree takes a little longer than its rows do: it is grown, and what it keeps is moved.
    """
    drafting = 0.35 + 0.03 * form.k + 0.002 * batch if form.k else 0
    growing = 0 if form.chain else 0.15
    return 4 + 0.01 * batch + drafting + growing + 0.02 * max(0, batch * (form.nodes + 1) - 32)


def busy(batch: int, form: DraftShape) -> float:
    """A target that is compute-bound at once: no speculation pays at batch 64."""
    return 4 + 0.08 * batch * (form.nodes + 1) + (0.5 if form.k else 0)


def shares(profile: Profile, form: DraftShape, width: float) -> np.ndarray:
    """Kept at each depth, given those before. A tree has `width` times as many chances there as nodes are to depths, in
    powers of that."""
    of = np.array(profile[: form.k]) / np.array((1.0, *profile))[: form.k].clip(1e-9)
    return of if form.chain else 1 - (1 - of) ** (form.nodes / form.k) ** width


class Simulation:
    """Steps of such an engine: what was chosen, and what it costs in the mean.

    `ahead`: as the engine has it, a step verifies what there is of the drafts of the step before, and drafts for the
    next one.
    `width`: how much trees are worth.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        cost: Cost,
        forms: Sequence[DraftShape],
        noise: float = 0.0,
        seed: int = 0,
        ahead: bool = True,
        width: float = 0.4,
    ) -> None:
        self.policy, self.cost, self.forms, self.noise = policy, cost, forms, noise
        self.random, self.ahead, self.width = np.random.default_rng(seed), ahead, width
        self.drafted = chain(0)
        self.choices: list[DraftChoice] = []

    def tokens(self, profile: Profile, form: DraftShape) -> float:
        return 1 + float(np.cumprod(shares(profile, form, self.width)).sum())

    def best(self, batch: int, profile: Profile) -> DraftShape:
        return max(self.forms, key=lambda form: self.tokens(profile, form) / self.cost(batch, form))

    def run(self, steps: int, batch: int, profile: Profile) -> float:
        """The time that the chosen forms take in the mean, relative to the best fixed one for as many tokens."""
        spent = needed = 0.0
        best = self.best(batch, profile)
        for _ in range(steps):
            choice = self.policy.choose(batch)
            self.choices.append(choice)
            form = verifiable_shape(choice.tree, [self.drafted]) if self.ahead else choice.tree
            self.drafted = made = choice.tree if form == choice.tree else self.forms[-1]
            seconds = self._seconds(batch, form) if form == made else None
            self.policy.observe(batch, form, seconds, self._held(batch, form, profile))
            spent += self.cost(batch, form)
            needed += (
                self.cost(batch, best) * self.tokens(profile, form) / self.tokens(profile, best)
            )
        return spent / needed

    def _held(self, batch: int, form: DraftShape, profile: Profile) -> list[AcceptedCounts]:
        """What a form keeps, a larger one keeps of the same drafts too."""
        chance = self.random.random((batch, form.k))
        trees = [
            one
            for one in self.forms
            if not one.chain and one.k == form.k and one.nodes <= form.nodes
        ]
        kept = {
            one: leading(chance < shares(profile, one, self.width))
            for one in {form, chain(form.k), *trees}
        }
        smaller = [(one.nodes, kept[one]) for one in trees]
        return [
            AcceptedCounts(
                int(kept[form][b]),
                int(kept[chain(form.k)][b]),
                path([(n, int(of[b])) for n, of in smaller]),
            )
            for b in range(batch)
        ]

    def _seconds(self, batch: int, form: DraftShape) -> float:
        disturbed = 5.0 if self.noise and self.random.random() < 0.02 else 1.0
        return self.cost(batch, form) * float(self.random.lognormal(0, self.noise)) * disturbed

    def last(self, count: int) -> list[DraftShape]:
        return [choice.tree for choice in self.choices[-count:]]


class Served:
    """An engine whose requests come and go: each that ends is replaced, while there are any, and the step in which the
    new one's prompt is read is not timed. At the end the batch shrinks to nothing."""

    def __init__(
        self,
        policy: DraftPolicy,
        cost: Cost,
        forms: Sequence[DraftShape],
        profile: Profile,
        seed: int = 0,
    ) -> None:
        self.policy, self.cost, self.forms, self.profile = policy, cost, forms, profile
        self.steps = Simulation(policy, cost, forms, 0.05, seed)

    def run(self, requests: int, users: int, length: int = 180) -> float:
        """Tokens a second."""
        random = np.random.default_rng(0)
        waiting = [int(n) for n in np.minimum(2 * length, random.geometric(1 / length, requests))]
        left: list[int] = []
        drafted: list[DraftShape] = []
        total, spent = sum(waiting), 0.0
        while waiting or left:
            joining = min(users - len(left), len(waiting))
            left += [waiting.pop() for _ in range(joining)]
            drafted += [self.forms[-1]] * joining
            batch = len(left)
            wanted = self.policy.choose(batch, timed=not joining).tree
            form = verifiable_shape(wanted, drafted)
            made = wanted if form == wanted else self.forms[-1]
            held = self.steps._held(batch, form, self.profile)
            told = form == made and not joining
            self.policy.observe(
                batch, form, self.steps._seconds(batch, form) if told else None, held
            )
            spent += self.cost(batch, form) + (0.5 if joining else 0.0)
            left = [
                n for one, kept in zip(left, held, strict=True) if (n := one - kept.kept - 1) > 0
            ]
            drafted = [made] * len(left)
        return total / spent


def leading(holds: np.ndarray) -> np.ndarray:
    return np.cumprod(holds, axis=1).sum(1)


def path(kept: Sequence[tuple[int, int]]) -> int:
    """Rows of which trees of so many nodes keep so many."""
    rows, last, before = {0}, 0, 0
    for nodes, count in kept:
        rows |= {last + 1 + i for i in range(count - before)}
        last, before = nodes, count
    return sum(1 << row for row in rows)


def calibrated(cost: Cost, forms: Sequence[DraftShape]) -> AdaptivePolicy:
    policy = AdaptivePolicy(forms)
    policy.calibrate(
        {(batch, form): cost(batch, form) for batch in (1, 4, 16, 64) for form in forms}
    )
    return policy

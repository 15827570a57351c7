"""What to draft in the next step: nothing, a chain or a tree, whichever gives the most tokens per second.

    tokens per step and request   E(form), from what was accepted: expected.py
    seconds per step              c(b, nodes), measured; an unknown one is told by what is known: costs.py
    choose                        the largest b E(form) / c(b, nodes)

A step without drafts teaches nothing about acceptance, and a step of one form nothing about the cost of others. So now
and then two steps are spent on another form: a neighbor of the best in the order of nodes, a tree beside a chain, the
best chain beside a tree; on smaller ones less often, for what they keep is known. They are paid from a credit of 1 % of
the steps: it loses no more. None are begun in a step whose time will not be told, for a prompt is read in it too.
Everything is deterministic, given what was observed.

The drafter's cache is kept up to date without drafts too: its cost is in c(b, 0).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.step_costs import StepCosts
from peagle.engine.policy.yield_model import YieldModel
from peagle.errors import UserError

MARGIN = 0.01  # a new form must be so much faster
SHARE = 0.01  # of the steps may be lost by exploring
PAUSE = {True: 8, False: 25}  # steps between explorations: without speculation, with
LOSS = {
    True: 1.0,
    False: 0.5,
}  # of a step: a neighbor known to lose more is not tried (K=1 cannot win more than 1)
AWAY = (
    20  # steps without a form, after which its costs are old: two of them stay beside the new ones
)
OLD = 250  # steps after which the cost of a smaller form is measured again: what it keeps, the larger one shows
LONG = 1000  # steps after which a cost is too old to be trusted
BLIND = 3  # the longest chain before costs are known, where they cannot be measured
CHAINS = (0, 1, 2, 3, 5, 7, 11, 15)
SMALLEST = (
    16  # rows of a tree, the newest token among them: kernels take them 16, 32 or 64 at a time
)
TREES = 3  # at most so many of them to choose from
APART = 1.2  # times as many nodes has the largest at least


def candidate_shapes(k_most: int, tree: int = 0) -> tuple[DraftShape, ...]:
    """What there is to choose from: nothing, chains up to K, and trees of that depth with up to `tree` nodes."""
    chains = (*(k for k in CHAINS if k < k_most), k_most)
    smaller = [
        nodes for n in range(TREES) if k_most < (nodes := (SMALLEST << n) - 1) < tree / APART
    ]
    sizes = (*smaller[1 - TREES :], tree) if tree else ()
    return (*(DraftShape(k, k) for k in chains), *(DraftShape(k_most, nodes) for nodes in sizes))


@dataclass(frozen=True, slots=True)
class DraftChoice:
    tree: DraftShape
    reason: str
    expected: dict[DraftShape, float] = field(
        default_factory=dict
    )  # tokens per second of the whole batch


class DraftPolicy(Protocol):
    def choose(
        self,
        batch: int,
        outlook: Sequence[float] | None = None,
        chains: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        """`outlook`: of Expected.tokens; `chains`: nothing else can run; not `timed`: nothing is learned of costs."""
        ...

    def observe(
        self, batch: int, tree: DraftShape, seconds: float | None, held: Sequence[AcceptedCounts]
    ) -> None: ...


class FixedPolicy:
    def __init__(self, tree: DraftShape) -> None:
        self.tree = tree

    def choose(
        self,
        batch: int,
        outlook: Sequence[float] | None = None,
        chains: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        return DraftChoice(DraftShape(self.tree.k, self.tree.k) if chains else self.tree, "fixed")

    def observe(
        self, batch: int, tree: DraftShape, seconds: float | None, held: Sequence[AcceptedCounts]
    ) -> None:
        pass


class AdaptivePolicy:
    def __init__(self, candidates: Sequence[DraftShape]) -> None:
        self.candidates = tuple(sorted(set(candidates), key=lambda form: (form.nodes, form.k)))
        if NO_DRAFT not in self.candidates:
            told = ", ".join(map(str, self.candidates))
            raise UserError(
                f"what to draft is chosen among {told or 'nothing'}, but K=0 must be among them"
            )
        self.emits, self.costs = YieldModel(self.candidates), StepCosts()
        self.tree = NO_DRAFT  # the best so far
        self.step = self.explored = 0
        self.credit = 0.0  # steps that exploring may lose
        self.trial: DraftShape | None = (
            None  # to explore once more: the first step with it made its drafts in another form
        )
        self.steps_at: Counter[int] = Counter()  # by bucket
        self.ran: dict[
            tuple[int, DraftShape], int
        ] = {}  # (bucket, form) -> the bucket's step it last ran in
        self.tokens = self.emits.tokens()
        self.seconds: dict[DraftShape, float] = {}  # of each form at the batch of the last choice

    def calibrate(self, costs: Mapping[tuple[int, DraftShape], float]) -> None:
        """Costs by batch and form, measured before the first request, without the host's share."""
        for (batch, tree), seconds in costs.items():
            self.costs.calibrate(batch, tree.nodes, seconds)

    def choose(
        self,
        batch: int,
        outlook: Sequence[float] | None = None,
        chains: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        forms = [form for form in self.candidates if form.is_chain] if chains else self.candidates
        if (unmeasured := self._unmeasured(batch, forms, timed)) is not None:
            return DraftChoice(unmeasured, "measuring: its cost is not known yet")
        self.tokens = self.emits.tokens(outlook)
        self.seconds = {form: self._cost(batch, form) for form in self.candidates}
        rates = {form: batch * self.tokens[form] / self.seconds[form] for form in forms}
        best = max(rates, key=lambda form: rates[form])
        if self.tree not in rates:
            return DraftChoice(best, "fastest chain", rates)
        reason = (
            f"held: {best} is less than {MARGIN:.0%} faster" if best != self.tree else "fastest"
        )
        if rates[best] > rates[self.tree] * (1 + MARGIN):
            self.tree, reason = best, "fastest"
        trial, self.trial = self.trial, None  # the second step of an exploration
        if trial is None and timed and not chains and (trial := self._neighbor(batch)) is not None:
            self.explored, self.trial = self.step, trial if trial.nodes > self.tree.nodes else None
            self.credit -= self._price(trial)
        if trial is None or trial not in rates:
            return DraftChoice(self.tree, reason, rates)
        return DraftChoice(trial, f"exploring beside {self.tree}", rates)

    def observe(
        self, batch: int, tree: DraftShape, seconds: float | None, held: Sequence[AcceptedCounts]
    ) -> None:
        """A decoding step that verified this form, by request.

        No seconds: it prefilled as well, or drafted another form for the next step than it verified, so that its time
        is not that of any form.
        """
        bucket = self.costs.bucket(batch)
        self.step += 1
        self.steps_at[bucket] += 1
        self.emits.observe(batch, tree, held)
        self.credit = min(self.credit + SHARE, 2.0)
        if seconds is None:
            return
        if self.steps_at[bucket] - self.ran.get((bucket, tree), 0) > AWAY:
            self.costs.forget(batch, tree.nodes)
        self.ran[bucket, tree] = self.steps_at[bucket]
        self.costs.add(batch, tree.nodes, seconds)

    def _unmeasured(
        self, batch: int, forms: Sequence[DraftShape], timed: bool
    ) -> DraftShape | None:
        """A form that was begun runs twice, so that one disturbed step decides nothing.

        Where neither this batch size nor another one is known, both ends of the line are begun, and the longest chain.
        """
        counts = {form: self.costs.count(batch, form.nodes) for form in forms}
        if not self.costs.before and self.costs.elsewhere(batch, 0) is None:
            chains = [form for form in forms if form.is_chain]
            ends = [form for form in (NO_DRAFT, chains[-1], forms[-1]) if counts[form] < 3]
            if ends:
                return ends[0] if timed else [form for form in chains if form.k <= BLIND][-1]
        return next((form for form, count in counts.items() if count == 1), None) if timed else None

    def _cost(self, batch: int, form: DraftShape) -> float:
        cost = self.costs.seconds(batch, form.nodes)
        assert cost is not None, "what is unknown is measured first"
        return cost

    def _loss(self, form: DraftShape) -> float:
        """Steps of the best form that a step of this one takes longer than that one takes for as many tokens."""
        return (
            self.seconds[form] / self.seconds[self.tree]
            - self.tokens[form] / self.tokens[self.tree]
        )

    def _age(self, batch: int, form: DraftShape) -> int:
        """Steps of this batch size since it last ran there. What never did is due, if nothing else tells its cost."""
        bucket = self.costs.bucket(batch)
        never = 0 if self.costs.before else -LONG
        return self.steps_at[bucket] - self.ran.get((bucket, form), never)

    def _price(self, form: DraftShape) -> float:
        """What exploring this form loses, as far as one knows: a larger one is drafted first, after a smaller one the
        best must be drafted again."""
        return 2 * max(0.0, self._loss(form))

    def _neighbor(self, batch: int) -> DraftShape | None:
        """A neighbor of the best form, if it is time and the credit lasts: of two, the one that ran longer ago.

        What has not run for long, or no speculation at all, which must not be faster, is tried though it looks slow.
        """
        idle = self.tree == NO_DRAFT
        if self.step - self.explored < PAUSE[idle]:
            return None
        age = {form: self._age(batch, form) for form in self.candidates}
        at = self.candidates.index(self.tree)
        near = [form for form in self.candidates[max(0, at - 1) : at + 2] if form != self.tree]
        due = [form for form in (NO_DRAFT, *near) if form != self.tree and age[form] >= LONG]
        worth = [
            form
            for form in {*near, *self._rivals()}
            if form.nodes > self.tree.nodes or age[form] >= OLD
        ]
        options = due or [form for form in worth if self._loss(form) < LOSS[idle]]
        affordable = [form for form in options if self._price(form) <= self.credit]
        return max(affordable, key=lambda form: (age[form], -form.nodes), default=None)

    def _rivals(self) -> list[DraftShape]:
        """Every tree, for it shows what all smaller forms keep; beside a tree, the best chain."""
        trees = [form for form in self.candidates if not form.is_chain and form != self.tree]
        if self.tree.is_chain:
            return trees
        return [*trees, min((form for form in self.candidates if form.is_chain), key=self._loss)]

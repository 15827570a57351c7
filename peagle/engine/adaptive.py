"""How many tokens to draft in the next step: the K with the most tokens per second; 0 if no speculation is faster.

    tokens per step and request   E(K) = 1 + a_1 + a_1 a_2 + ... + a_1..a_K   (a_i: draft i is kept, given those before)
    seconds per step              c(b, K), measured; an unknown one is read off a line through known ones
    choose                        the largest b E(K) / c(b, K)

A step with K = 0 teaches nothing about acceptance, and a step with one K nothing about the cost of others. So now and
then two steps are spent on a neighbour of the best K, paid from a credit of 1 % of the steps: it loses no more.
Everything is deterministic, given what was observed. The drafter's cache is kept up to date with K = 0 too: its cost
is in c(b, 0).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Protocol

from peagle.engine.costs import Costs
from peagle.errors import UserError

FORGET = 0.95  # of what is known about acceptance is kept from step to step, at batch 1
EVIDENCE = 2.0  # samples that are kept when nothing new is learned
FADE = 0.93  # each position is so much less accepted than the one before: where nothing is known
MARGIN = 0.01  # a new K must be so much faster
SHARE = 0.01  # of the steps may be lost by exploring
PAUSE = {True: 8, False: 50}  # steps between explorations: without speculation, with
LOSS = {True: 1.0, False: 0.5}  # of a step: a neighbour known to lose more is not tried (K=1 cannot win more than 1)
AWAY = 20  # steps without a K, after which its costs are old: two of them stay beside the new ones
LONG = 500  # steps after which a cost is too old to be trusted


@dataclass(frozen=True, slots=True)
class Choice:
    k: int
    reason: str
    expected: dict[int, float] = field(default_factory=dict)  # K -> tokens per second of the whole batch


class Policy(Protocol):
    def choose(self, batch: int) -> Choice: ...

    def observe(self, batch: int, k: int, seconds: float | None, accepted: Sequence[int]) -> None: ...

    def calibrate(self, costs: Mapping[tuple[int, int], float]) -> None: ...


class FixedK:
    def __init__(self, k: int) -> None:
        self.k = k

    def choose(self, batch: int) -> Choice:
        return Choice(self.k, "fixed")

    def observe(self, batch: int, k: int, seconds: float | None, accepted: Sequence[int]) -> None:
        pass

    def calibrate(self, costs: Mapping[tuple[int, int], float]) -> None:
        pass


class Acceptance:
    """The share of drafts accepted at each position, given that those before were: decaying counts."""

    def __init__(self, k_max: int) -> None:
        self.tried, self.kept = [0.0] * k_max, [0.0] * k_max
        self.tried[:1], self.kept[:1] = [EVIDENCE], [0.6 * EVIDENCE]  # a drafter is worth a try

    def observe(self, batch: int, k: int, accepted: Sequence[int]) -> None:
        """Larger batches tell more: what was known is replaced faster. Old evidence fades to a little, not to none."""
        forget = FORGET ** sqrt(batch)
        for i in range(len(self.tried)):
            if i < k or self.tried[i] * forget > EVIDENCE:
                self.tried[i] *= forget
                self.kept[i] *= forget
            if i < k:
                self.tried[i] += sum(a >= i for a in accepted)
                self.kept[i] += sum(a > i for a in accepted)

    def tokens(self) -> list[float]:
        """E(K) for K = 0..k_max. One sample's weight says that a position is like the one before it."""
        expected, reached, share = [1.0], 1.0, 1.0
        for tried, kept in zip(self.tried, self.kept, strict=True):
            share = (kept + share * FADE) / (tried + 1) if expected[1:] else kept / tried
            reached *= share
            expected.append(expected[-1] + reached)
        return expected


class AdaptiveK:
    def __init__(self, candidates: Sequence[int] = (0, 1, 2, 3, 5, 7)) -> None:
        self.candidates = tuple(sorted(set(candidates)))
        if not self.candidates or self.candidates[0] != 0:
            raise UserError(f"K is chosen among {self.candidates}, but 0 (no speculation) must be among them")
        self.acceptance, self.costs = Acceptance(self.candidates[-1]), Costs()
        self.k = 0  # the best so far
        self.step = self.explored = 0
        self.credit = 0.0  # steps that exploring may lose
        self.trial: int | None = None  # a K to explore once more: the first step with it made its drafts at another K
        self.ran: dict[tuple[int, int], int] = {}  # (bucket, K) -> the step it last ran in

    def calibrate(self, costs: Mapping[tuple[int, int], float]) -> None:
        """Costs by (batch, K) that were measured before the first request; each weighs as much as three steps."""
        for (batch, k), seconds in costs.items():
            for _ in range(3):
                self.costs.add(batch, k, seconds)

    def choose(self, batch: int) -> Choice:
        if (unknown := self._unmeasured(batch)) is not None:
            return Choice(unknown, "measuring: its cost is not known yet")
        rates = self._rates(batch)
        best = max(rates, key=lambda k: rates[k])
        reason = f"held: K={best} is less than {MARGIN:.0%} faster" if best != self.k else "fastest"
        if rates[best] > rates.get(self.k, 0) * (1 + MARGIN):
            self.k, reason = best, "fastest"
        trial, self.trial = self.trial, None  # the second step of an exploration
        if trial is None and (trial := self._neighbour(batch)) is not None:
            self.explored, self.trial = self.step, trial if self._twice(batch, trial) else None
            self.credit -= self._price(batch, trial)
        return Choice(self.k, reason, rates) if trial is None else Choice(trial, f"exploring beside K={self.k}", rates)

    def observe(self, batch: int, k: int, seconds: float | None, accepted: Sequence[int]) -> None:
        """A decoding step that verified K drafts: `accepted` of each request.

        No seconds: it prefilled as well, or made another number of drafts for the next step than it verified, so that
        its time is not that of any K.
        """
        self.step += 1
        self.acceptance.observe(batch, k, accepted)
        self.credit = min(self.credit + SHARE, 2.0)
        if seconds is None:
            return
        where = self.costs.bucket(batch), k
        if self.step - self.ran.get(where, self.step) > AWAY:
            self.costs.forget(batch, k)
        self.ran[where] = self.step
        self.costs.add(batch, k, seconds)

    def _unmeasured(self, batch: int) -> int | None:
        """A K that was begun runs three times, so that one disturbed step decides nothing.

        Where neither this batch size nor another one is known, both ends of the line are begun.
        """
        known = self.costs.elsewhere(batch, 0) is not None
        counts = {k: self.costs.count(batch, k) for k in self.candidates}
        ends = () if known else (0, self.candidates[-1])
        return next((k for k, count in counts.items() if count < 3 and (count or k in ends)), None)

    def _rates(self, batch: int) -> dict[int, float]:
        tokens = self.acceptance.tokens()
        return {k: batch * tokens[k] / self._cost(batch, k) for k in self.candidates}

    def _cost(self, batch: int, k: int) -> float:
        cost = self.costs.seconds(batch, k)
        assert cost is not None, "what is unknown is measured first"
        return cost

    def _loss(self, batch: int, k: int) -> float:
        """Steps with the best K that a step with this K takes longer than that one takes for as many tokens."""
        tokens = self.acceptance.tokens()
        return self._cost(batch, k) / self._cost(batch, self.k) - tokens[k] / tokens[self.k]

    def _age(self, batch: int, k: int) -> int:
        return self.step - self.ran.get((self.costs.bucket(batch), k), -LONG)

    def _twice(self, batch: int, k: int) -> bool:
        """One step tells the acceptance, which is all that is missing without speculation; two tell the cost."""
        return self.k > 0 or self._age(batch, k) >= LONG

    def _price(self, batch: int, k: int) -> float:
        """What exploring this K loses, as far as one knows."""
        return (1 + self._twice(batch, k)) * min(1.0, max(0.0, self._loss(batch, k)))

    def _neighbour(self, batch: int) -> int | None:
        """A neighbour of the best K, if it is time and the credit lasts: of two, the one that ran longer ago.

        What has not run for long, or no speculation at all, which must not be faster, is tried though it looks slow.
        """
        if self.step - self.explored < PAUSE[self.k == 0]:
            return None
        age = {k: self._age(batch, k) for k in self.candidates}
        at = self.candidates.index(self.k)
        near = [k for k in self.candidates[max(0, at - 1) : at + 2] if k != self.k]
        due = [k for k in {0, *near} if k != self.k and age[k] >= LONG]
        options = due or [k for k in near if self._loss(batch, k) < LOSS[self.k == 0]]
        affordable = [k for k in options if self._price(batch, k) <= self.credit]
        return max(affordable, key=lambda k: (age[k], -k), default=None)

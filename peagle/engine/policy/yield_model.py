"""How many tokens a step of each form is expected to emit, given what steps emitted so far.

    chains   E(K) = 1 + a_1 + a_1 a_2 + ... + a_1..a_K   (a_i: draft i is kept, given those before)
    trees    E(tree) = 1 + g_1 .. g_n (E(K) - 1)         (g_1: the smallest tree against the chain of its depth; g_i:
                                                          each larger tree against the one before)

A tree's step shows what the chain and every smaller tree would have kept of the same drafts (held.py). So gains compare
forms on the same steps, and a text that becomes easier or harder does not look like a change of a gain: shares follow
the text fast, gains change slowly. A step of a smaller form says nothing about a larger one: the less is known of that,
the better it looks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt

from peagle.draft_shape import DraftShape
from peagle.engine.policy.accepted import AcceptedCounts

FORGET = 0.96  # of what is known about the text is kept from step to step, at batch 1
SLOW = 0.998  # of what is known about a gain
EVIDENCE = 2.0  # samples that are kept when nothing new is learned
FADE = 0.93  # each position is so much less accepted than the one before: where nothing is known
GAIN = 1.15  # of a tree that never ran
MOST = 4.0  # a gain is no larger: where chains keep nothing it would grow for ever
PRIOR = 10.0  # tokens that a gain is worth before it was seen
ENOUGH = 300.0  # tokens after which a gain is taken as it was seen
CURIOSITY = (
    1.0  # standard errors, of a token's spread of 1, by which a gain looks better before that
)


class Acceptance:
    """The share of a chain's drafts accepted at each position, given that those before were: decaying counts."""

    def __init__(self, k_max: int) -> None:
        self.tried, self.kept = [0.0] * k_max, [0.0] * k_max
        self.tried[:1], self.kept[:1] = [EVIDENCE], [0.6 * EVIDENCE]  # a drafter is worth a try

    def observe(self, batch: int, k: int, held: Sequence[AcceptedCounts]) -> None:
        """Larger batches tell more: what was known is replaced faster. Old evidence fades to a little, not to none."""
        forget = FORGET ** sqrt(batch)
        tried, kept = (
            beyond((one.tried(k) for one in held), k),
            beyond((one.chain for one in held), k),
        )
        for i in range(len(self.tried)):
            if i < k or self.tried[i] * forget > EVIDENCE:
                self.tried[i] *= forget
                self.kept[i] *= forget
            if i < k:
                self.tried[i] += tried[i]
                self.kept[i] += kept[i]

    def tokens(self) -> list[float]:
        """E(K) for K = 0..k_max. One sample's weight says that a position is like the one before it."""
        expected, reached, share = [1.0], 1.0, 1.0
        for tried, kept in zip(self.tried, self.kept, strict=True):
            share = (kept + share * FADE) / (tried + 1) if expected[1:] else kept / tried
            reached *= share
            expected.append(expected[-1] + reached)
        return expected


class Ratio:
    """What was kept, against what something else kept: decaying sums, which fade to their first weight, not to none."""

    def __init__(self, value: float, weight: float) -> None:
        self.kept, self.weight, self.least = value * weight, weight, weight

    @property
    def value(self) -> float:
        return self.kept / self.weight

    @property
    def hoped(self) -> float:
        """The value, and the more the less is known."""
        return self.value * (1 + CURIOSITY * max(0.0, self.weight**-0.5 - ENOUGH**-0.5))

    def add(self, forget: float, kept: float, weight: float) -> None:
        if self.weight * forget > self.least:
            self.kept *= forget
            self.weight *= forget
        self.weight += weight
        self.kept = min(self.kept + kept, MOST * self.weight)


class YieldModel:
    def __init__(self, forms: Sequence[DraftShape]) -> None:
        """Trees among them have one depth; smaller ones come first."""
        self.forms = forms
        self.chains = Acceptance(max(form.k for form in forms))
        self.by_k = self.chains.tokens()  # E(K) as steps last told it
        self.truth = Ratio(1.0, EVIDENCE)  # what chains keep of what an outlook foretold
        self.foretold: list[float] | None = None
        self.gains = {form: Ratio(GAIN, PRIOR) for form in forms if not form.is_chain}

    def observe(self, batch: int, form: DraftShape, held: Sequence[AcceptedCounts]) -> None:
        self.chains.observe(batch, form.k, held)
        self.by_k = self.chains.tokens()
        before = sum(self._chain(one, form.k) for one in held)
        if form.k and self.foretold is not None:
            self.truth.add(FORGET ** sqrt(batch), before, (self.foretold[form.k] - 1) * len(held))
        self.foretold = None
        slow = SLOW ** sqrt(batch)
        for tree, gain in self.gains.items():
            if form in self.gains and tree.nodes <= form.nodes:
                kept = sum(one.by(tree.nodes) for one in held)
                gain.add(slow, kept, before)
                before = kept

    def _chain(self, held: AcceptedCounts, k: int) -> float:
        """What a chain of k keeps: where it goes on behind what the step shows, what is to be expected of it there."""
        at = held.tried(k)
        if at > held.chain or not at:
            return held.chain
        reached = self.by_k[at] - self.by_k[at - 1]
        return at + min((self.by_k[k] - self.by_k[at]) / max(reached, 1e-9), k - at)

    def tokens(self, outlook: Sequence[float] | None = None) -> dict[DraftShape, float]:
        """`outlook`: acceptance that a drafter itself predicts, per position given those before, for the drafts that
        wait: instead of what was accepted lately, but no more of it is believed than came true."""
        self.foretold = None if outlook is None else predicted(outlook, len(self.chains.tried))
        chains = self.by_k
        if self.foretold is not None:
            chains = [1 + min(k, self.truth.value * (e - 1)) for k, e in enumerate(self.foretold)]
        tokens, gain = {form: chains[form.k] for form in self.forms}, 1.0
        for tree, ratio in self.gains.items():
            gain *= ratio.hoped
            tokens[tree] = 1 + min(tree.k, gain * (chains[tree.k] - 1))
        return tokens


def beyond(counts: Iterable[int], k: int) -> list[int]:
    """How many of the counts are larger than 0, 1, .. k - 1."""
    among = Counter(counts)
    return list(accumulate(among[i] for i in range(k, 0, -1)))[::-1]


def predicted(shares: Sequence[float], k_max: int) -> list[float]:
    """E(K) for K = 0..k_max from the share accepted at each position; beyond them it fades."""
    expected, reached, share = [1.0], 1.0, 1.0
    for k in range(k_max):
        share = shares[k] if k < len(shares) else share * FADE
        reached *= share
        expected.append(expected[-1] + reached)
    return expected

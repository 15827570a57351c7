"""How many tokens a step of each form is expected to emit, given what steps emitted so far.

    chains   E(K) = 1 + a_1 + a_1 a_2 + ... + a_1..a_K   (a_i: draft i is kept, given those before)
    trees    E(tree) = 1 + gain (E(K) - 1)               (gain: against the chain of the same depth)

A chain's step says nothing about what a tree would have kept, and a tree's step must not count as a chain's: it keeps
more at every depth. What all of them share is the text, which is easy or hard. So there is one level, which follows the
text fast, whatever runs, and a base of each kind (all chains are one, each tree is one), which changes slowly: a kind
keeps base times level. Kinds are compared by their bases, so a change of the text does not look like a change of kind.
"""

from collections.abc import Sequence
from math import sqrt

from peagle.tree import Tree

FORGET = 0.95  # of what is known about the text is kept from step to step, at batch 1
SLOW = 0.995  # of what is known about a kind
EVIDENCE = 2.0  # samples that are kept when nothing new is learned
FADE = 0.93  # each position is so much less accepted than the one before: where nothing is known
GAIN = 1.25  # of a tree that never ran, in kept tokens: it is worth a try
PRIOR = 10.0  # tokens that a gain is worth before it was seen
CURIOSITY = 2.0  # standard errors by which the kind that is less known looks better


class Acceptance:
    """The share of a chain's drafts accepted at each position, given that those before were: decaying counts."""

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


class Ratio:
    """What was kept, against what was expected: decaying sums, which fade to their first weight, not to none."""

    def __init__(self, value: float, weight: float) -> None:
        self.kept, self.weight, self.least = value * weight, weight, weight

    @property
    def value(self) -> float:
        return self.kept / self.weight

    @property
    def error(self) -> float:
        """As many times the spread of a step is its standard error."""
        return self.weight**-0.5

    def fade(self, forget: float) -> None:
        if self.weight * forget > self.least:
            self.kept *= forget
            self.weight *= forget

    def add(self, forget: float, kept: float, weight: float) -> None:
        self.fade(forget)
        self.kept += kept
        self.weight += weight


class Expected:
    def __init__(self, forms: Sequence[Tree]) -> None:
        self.forms = forms
        self.chains = Acceptance(max(form.k for form in forms))
        self.by_k = self.chains.tokens()  # E(K) as chains last told it
        self.level = Ratio(self.by_k[-1] - 1, EVIDENCE)  # tokens that the longest chain keeps
        self.chain = Ratio(1.0, PRIOR)
        self.truth = Ratio(1.0, EVIDENCE)  # what chains keep of what an outlook foretold
        self.foretold: list[float] | None = None
        self.trees = {form: Ratio(GAIN, PRIOR) for form in forms if not form.chain}

    def observe(self, batch: int, form: Tree, accepted: Sequence[int]) -> None:
        if form.chain:
            self.chains.observe(batch, form.k, accepted)
            self.by_k = self.chains.tokens()
        if form.chain and self.foretold is not None:
            self.truth.add(FORGET ** sqrt(batch), sum(accepted), (self.foretold[form.k] - 1) * len(accepted))
        self.foretold = None
        if not self.trees:
            return
        forget, slow = (share ** sqrt(batch) for share in (FORGET, SLOW))
        if not form.k:
            self.level.fade(forget)
            return
        kind = self.chain if form.chain else self.trees.get(form)
        if kind is None:
            return
        part = parts(self.by_k)[form.k] * len(accepted)
        self.level.add(forget, sum(accepted), kind.value * part)
        kind.add(slow, sum(accepted), self.level.value * part)

    def tokens(self, outlook: Sequence[float] | None = None) -> dict[Tree, float]:
        """`outlook`: acceptance that a drafter itself predicts, per position given those before, for the drafts that
        wait: instead of what was accepted lately, but no more of it is believed than came true."""
        self.foretold = None if outlook is None else predicted(outlook, len(self.chains.tried))
        chains = self.by_k
        if self.foretold is not None:
            chains = [1 + min(k, self.truth.value * (e - 1)) for k, e in enumerate(self.foretold)]
        if not self.trees:
            return {form: chains[form.k] for form in self.forms}
        part = parts(chains)
        bases = self._bases()
        level = self.level.value if outlook is None else (chains[-1] - 1) / max(bases[None], 1e-9)
        return {form: 1 + min(form.k, level * part[form.k] * bases.get(form, bases[None])) for form in self.forms}

    def _bases(self) -> dict[Tree | None, float]:
        """Of chains (None) and trees: more nodes keep no fewer. The less known looks better than it was seen to be."""
        names, kinds = [None, *self.trees], [self.chain, *self.trees.values()]
        spread = CURIOSITY * sqrt(1 + self.level.value)
        return {
            name: base * (1 + spread * kind.error) / (1 + spread * self.chain.error)
            for name, kind, base in zip(names, kinds, rising(kinds), strict=True)
        }


def rising(ratios: Sequence[Ratio]) -> list[float]:
    """Their values, none below the one before it: those that are count as one (isotonic regression)."""
    pools: list[tuple[float, float, int]] = []
    for ratio in ratios:
        kept, weight, count = ratio.kept, ratio.weight, 1
        while pools and pools[-1][0] / pools[-1][1] > kept / weight:
            before = pools.pop()
            kept, weight, count = kept + before[0], weight + before[1], count + before[2]
        pools.append((kept, weight, count))
    return [kept / weight for kept, weight, count in pools for _ in range(count)]


def parts(tokens: Sequence[float]) -> list[float]:
    """What each K keeps of what the longest chain keeps."""
    return [(e - 1) / max(tokens[-1] - 1, 1e-9) for e in tokens]


def predicted(shares: Sequence[float], k_max: int) -> list[float]:
    """E(K) for K = 0..k_max from the share accepted at each position; beyond them it fades."""
    expected, reached, share = [1.0], 1.0, 1.0
    for k in range(k_max):
        share = shares[k] if k < len(shares) else share * FADE
        reached *= share
        expected.append(expected[-1] + reached)
    return expected

"""YieldModel: the number of tokens that a step of each draft shape is expected to emit.

A step of a tree shows what the chain and every smaller tree would have accepted of the same drafts
(accepted.py). Gains therefore compare shapes on the same steps, and text that becomes easier or
harder does not look like a change of a gain: acceptance rates follow the text fast, gains change
slowly. A step of a smaller shape says nothing about a larger one, so shapes with little evidence
get an optimistic estimate.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt

from peagle.draft_shape import DraftShape
from peagle.engine.policy.accepted import AcceptedCounts

# Weight that evidence keeps from one step to the next, at batch 1.
TEXT_DECAY = 0.96  # of acceptance rates, which follow the text
GAIN_DECAY = 0.998  # of tree gains
# A step of a large batch ages evidence by sqrt(batch) steps of batch 1, but by no more than this:
# the mean over many requests changes slowly, and a memory of two steps is noisy.
MAX_DECAY_STEPS = 4.0
# Evidence never decays below this many samples.
MIN_SAMPLES = 2.0
# Prior acceptance rate of the first draft: high enough to try a drafter.
PRIOR_ACCEPTANCE = 0.6
# Prior acceptance rate of a position, relative to the position before it.
POSITION_DECAY = 0.93
# Prior gain of a tree over the next smaller shape, and how many tokens of evidence it counts for.
PRIOR_TREE_GAIN = 1.15
PRIOR_GAIN_TOKENS = 10.0
# Limit of a ratio: without it a gain grows forever where chains accept nothing.
MAX_RATIO = 4.0
# Tokens of evidence from which on a gain is used without an optimistic bonus.
TRUSTED_GAIN_TOKENS = 300.0
# The bonus in standard errors, for a standard deviation of 1 per token.
OPTIMISM = 1.0


class ChainAcceptance:
    """The acceptance rate at each position of a chain, given that the drafts before are accepted.

    Rates are ratios of decaying counts.
    """

    def __init__(self, max_k: int) -> None:
        self.trials = [0.0] * max_k
        self.accepted = [0.0] * max_k
        self.trials[:1] = [MIN_SAMPLES]
        self.accepted[:1] = [PRIOR_ACCEPTANCE * MIN_SAMPLES]

    def observe(self, batch: int, k: int, counts: Sequence[AcceptedCounts]) -> None:
        """Learn from a step of depth k. Larger batches replace old evidence faster."""
        decay = TEXT_DECAY ** min(sqrt(batch), MAX_DECAY_STEPS)
        trials = count_above((each.chain_trials(k) for each in counts), k)
        accepted = count_above((each.chain for each in counts), k)
        for i in range(len(self.trials)):
            if i < k or self.trials[i] * decay > MIN_SAMPLES:
                self.trials[i] *= decay
                self.accepted[i] *= decay
            if i < k:
                self.trials[i] += trials[i]
                self.accepted[i] += accepted[i]

    def expected_tokens(self) -> list[float]:
        """E(K) for K = 0..max_k.

        Each position but the first has a prior of one sample: the rate of the position before it,
        times POSITION_DECAY.
        """
        expected = [1.0]
        reached = 1.0  # probability that all drafts up to this position are accepted
        rate = 1.0
        for trials, accepted in zip(self.trials, self.accepted, strict=True):
            if expected[1:]:
                rate = (accepted + rate * POSITION_DECAY) / (trials + 1)
            else:
                rate = accepted / trials
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


class DecayingRatio:
    """Accepted drafts over a baseline's: decaying sums that never fall below their prior weight."""

    def __init__(self, prior: float, weight: float) -> None:
        self.accepted = prior * weight
        self.baseline = weight
        self.min_baseline = weight

    @property
    def value(self) -> float:
        return self.accepted / self.baseline

    @property
    def optimistic(self) -> float:
        """The value with a bonus that shrinks to zero as evidence grows."""
        bonus = OPTIMISM * max(0.0, self.baseline**-0.5 - TRUSTED_GAIN_TOKENS**-0.5)
        return self.value * (1 + bonus)

    def add(self, decay: float, accepted: float, baseline: float) -> None:
        if self.baseline * decay > self.min_baseline:
            self.accepted *= decay
            self.baseline *= decay
        self.baseline += baseline
        self.accepted = min(self.accepted + accepted, MAX_RATIO * self.baseline)


class YieldModel:
    """Expected tokens per step and request, bonus token included, by draft shape.

        chains   E(K) = 1 + a_1 + a_1 a_2 + ... + a_1..a_K
        trees    E(tree) = 1 + g_1 .. g_n (E(K) - 1)

    a_i is the acceptance rate of draft i, given that those before it are accepted. g_1 is the gain
    of the smallest tree over the chain of its depth, g_i that of each larger tree over the next
    smaller one.

    Example: a = 0.8, 0.5 and a tree of depth 2 with a gain of 1.25:

        E(1) = 1.8    E(2) = 1 + 0.8 + 0.4 = 2.2    E(tree) = 1 + 1.25 * 1.2 = 2.5
    """

    def __init__(self, shapes: Sequence[DraftShape]) -> None:
        """Trees among the shapes have one depth; smaller ones come first."""
        self.shapes = shapes
        self.acceptance = ChainAcceptance(max(shape.k for shape in shapes))
        self.chain_tokens = self.acceptance.expected_tokens()  # E(K) after the last step
        # What chains accepted, relative to what the draft confidence predicted.
        self.confidence_ratio = DecayingRatio(1.0, MIN_SAMPLES)
        self.predicted_tokens: list[float] | None = None  # E(K) of the last draft confidence
        self.gains = {
            shape: DecayingRatio(PRIOR_TREE_GAIN, PRIOR_GAIN_TOKENS)
            for shape in shapes
            if not shape.is_chain
        }

    def observe(self, batch: int, shape: DraftShape, counts: Sequence[AcceptedCounts]) -> None:
        """Learn from a step that verified this shape; `counts` has one entry per request."""
        self.acceptance.observe(batch, shape.k, counts)
        self.chain_tokens = self.acceptance.expected_tokens()
        baseline = sum(self._accepted_by_chain(each, shape.k) for each in counts)
        if shape.k and self.predicted_tokens is not None:
            predicted = (self.predicted_tokens[shape.k] - 1) * len(counts)
            self.confidence_ratio.add(TEXT_DECAY ** sqrt(batch), baseline, predicted)
        self.predicted_tokens = None
        decay = GAIN_DECAY ** sqrt(batch)
        for tree, gain in self.gains.items():
            if shape in self.gains and tree.nodes <= shape.nodes:
                accepted = sum(each.accepted_by_tree(tree.nodes) for each in counts)
                gain.add(decay, accepted, baseline)
                baseline = accepted

    def _accepted_by_chain(self, counts: AcceptedCounts, k: int) -> float:
        """The drafts that a chain of length k accepts in this step.

        Where all decided drafts are accepted, the expectation for the undecided ones is added.
        """
        decided = counts.chain_trials(k)
        if decided > counts.chain or not decided:
            return counts.chain
        reached = self.chain_tokens[decided] - self.chain_tokens[decided - 1]
        more = (self.chain_tokens[k] - self.chain_tokens[decided]) / max(reached, 1e-9)
        return decided + min(more, k - decided)

    def expected_tokens(
        self, draft_confidence: Sequence[float] | None = None
    ) -> dict[DraftShape, float]:
        """E(shape) of every shape.

        `draft_confidence`: the acceptance rates that the drafter itself predicts for the drafts
        that wait to be verified, per position given those before. They replace the rates of
        recent steps, scaled by the share of earlier predictions that came true.
        """
        chain_tokens = self.chain_tokens
        self.predicted_tokens = None
        if draft_confidence is not None:
            max_k = len(self.acceptance.trials)
            self.predicted_tokens = tokens_from_rates(draft_confidence, max_k)
            ratio = self.confidence_ratio.value
            chain_tokens = [
                1 + min(k, ratio * (tokens - 1)) for k, tokens in enumerate(self.predicted_tokens)
            ]
        expected = {shape: chain_tokens[shape.k] for shape in self.shapes}
        gain = 1.0
        for tree, ratio_to_smaller in self.gains.items():
            gain *= ratio_to_smaller.optimistic
            expected[tree] = 1 + min(tree.k, gain * (chain_tokens[tree.k] - 1))
        return expected


def count_above(values: Iterable[int], k: int) -> list[int]:
    """How many of the values are larger than 0, 1, .. k - 1.

    >>> count_above([0, 1, 3], 4)
    [2, 1, 1, 0]
    """
    histogram = Counter(values)
    return list(accumulate(histogram[i] for i in range(k, 0, -1)))[::-1]


def tokens_from_rates(rates: Sequence[float], max_k: int) -> list[float]:
    """E(K) for K = 0..max_k from the acceptance rate at each position; beyond them rates decay."""
    expected = [1.0]
    reached = 1.0
    rate = 1.0
    for k in range(max_k):
        rate = rates[k] if k < len(rates) else rate * POSITION_DECAY
        reached *= rate
        expected.append(expected[-1] + reached)
    return expected

"""NgramAcceptance: how many n-gram drafts of a request are expected to be accepted.

Every step of a request shows what its n-gram draft would have accepted, whether it was verified or
not: the lookup is nearly free, and the emitted tokens tell. Two rates describe a draft: that its
first token is accepted, and that each later one is, given those before. Both depend on the length
of the match, follow all requests slowly, and the request itself fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from peagle.draft_shape import MAX_NGRAM, MIN_NGRAM

# Weight that evidence keeps from one step to the next.
REQUEST_DECAY = 0.9
SHARED_DECAY = 0.995
# What the shared rates count for beside the evidence of a request, in expected drafts.
SHARED_WEIGHT = 3.0
# The weight of the prior rates, in drafts.
PRIOR_WEIGHT = 4.0
# The most that a request may exceed the shared rates, and the highest rate.
MAX_RATIO = 1.2
MAX_RATE = 0.98


def prior_rate(match_length: int, shortest: float, longest: float) -> float:
    """The longer the match, the likelier its continuation."""
    return shortest + (longest - shortest) * (match_length - MIN_NGRAM) / (MAX_NGRAM - MIN_NGRAM)


@dataclass(slots=True)
class Evidence:
    """Decaying counts of drafts that were accepted, and of what was tried or expected."""

    accepted: float = 0.0
    baseline: float = 0.0

    def add(self, decay: float, accepted: float, baseline: float) -> None:
        self.accepted = self.accepted * decay + accepted
        self.baseline = self.baseline * decay + baseline

    @property
    def rate(self) -> float:
        return self.accepted / self.baseline

    @property
    def ratio(self) -> float:
        """Accepted drafts of a request, relative to what the shared rates expect."""
        ratio = (self.accepted + SHARED_WEIGHT) / (self.baseline + SHARED_WEIGHT)
        return min(ratio, MAX_RATIO)


@dataclass(slots=True)
class NgramRecord:
    """The n-gram drafts of one request so far; the baselines are what shared rates expect."""

    first: Evidence = field(default_factory=Evidence)
    later: Evidence = field(default_factory=Evidence)


class NgramAcceptance:
    """The shared rates, by match length: drafts that were accepted of those that were tried."""

    def __init__(self) -> None:
        lengths = range(MIN_NGRAM, MAX_NGRAM + 1)
        self.first = {n: self._prior(prior_rate(n, 0.3, 0.9)) for n in lengths}
        self.later = {n: self._prior(prior_rate(n, 0.5, 0.92)) for n in lengths}

    @staticmethod
    def _prior(rate: float) -> Evidence:
        return Evidence(rate * PRIOR_WEIGHT, PRIOR_WEIGHT)

    def observe(
        self, record: NgramRecord, match_length: int, drafts: Sequence[int], emitted: Sequence[int]
    ) -> None:
        """Learn from a step that emitted these tokens where the lookup proposed these drafts.

        Drafts behind the emitted tokens are not decided.
        """
        if not match_length or not emitted:
            return
        decided = min(len(drafts), len(emitted))
        agreeing = next((i for i in range(decided) if drafts[i] != emitted[i]), decided)
        first = min(agreeing, 1)
        tried_later = max(0, min(agreeing + 1, decided) - 1) if first else 0
        shared_first = self.first[match_length]
        shared_later = self.later[match_length]
        record.first.add(REQUEST_DECAY, first, shared_first.rate)
        shared_first.add(SHARED_DECAY, first, 1)
        if tried_later:
            later = agreeing - 1
            record.later.add(REQUEST_DECAY, later, tried_later * shared_later.rate)
            shared_later.add(SHARED_DECAY, later, tried_later)

    def rates(self, record: NgramRecord, match_length: int) -> tuple[float, float]:
        """The acceptance rates of the first draft and of each later one, given those before."""
        if not match_length:
            return 0.0, 0.0
        first = record.first.ratio * self.first[match_length].rate
        later = record.later.ratio * self.later[match_length].rate
        return min(first, MAX_RATE), min(later, MAX_RATE)


def expected_tokens(rates: tuple[float, float], k: int) -> float:
    """Tokens of a step that verifies k drafts: 1 + a (1 + b + b^2 + ...), for rates a and b.

    >>> expected_tokens((0.5, 0.5), 2)
    1.75
    """
    first, later = rates
    return 1 + first * (1 - later**k) / (1 - later)

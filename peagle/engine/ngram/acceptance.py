"""NgramAcceptance: how many n-gram drafts of a request are expected to be accepted.

Every step of a request shows what its n-gram draft would have accepted, whether it was verified or
not: the lookup is nearly free, and the emitted tokens tell. Two rates describe a draft: that its
first token is accepted, which depends on the length of the match, and that each later one is, given
those before. Both follow all requests slowly, and the request itself fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from peagle.draft_shape import MAX_NGRAM

# Weight that evidence keeps from one step to the next.
REQUEST_DECAY = 0.9
SHARED_DECAY = 0.995
# What the shared rates count for beside the evidence of a request, in drafts.
SHARED_WEIGHT = 3.0
# Prior rates and their weight in drafts. The longer the match, the likelier its continuation.
PRIOR_LATER_RATE = 0.75
PRIOR_WEIGHT = 4.0
MAX_RATE = 0.98


def prior_first_rate(match_length: int) -> float:
    """From 0.3 for two tokens to 0.8 for eight."""
    return 0.3 + 0.5 * (match_length - 2) / (MAX_NGRAM - 2)


@dataclass(slots=True)
class Evidence:
    """Decaying counts of drafts that were accepted, and of what was tried or expected."""

    accepted: float = 0.0
    baseline: float = 0.0

    def add(self, decay: float, accepted: float, baseline: float) -> None:
        self.accepted = self.accepted * decay + accepted
        self.baseline = self.baseline * decay + baseline


@dataclass(slots=True)
class NgramRecord:
    """The n-gram drafts of one request so far."""

    first: Evidence = field(default_factory=Evidence)  # baseline: the shared rates
    later: Evidence = field(default_factory=Evidence)  # baseline: drafts that were tried


class NgramAcceptance:
    def __init__(self) -> None:
        self.first = {
            n: Evidence(prior_first_rate(n) * PRIOR_WEIGHT, PRIOR_WEIGHT)
            for n in range(1, MAX_NGRAM + 1)
        }
        self.later = Evidence(PRIOR_LATER_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT)

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
        first = 1 if agreeing else 0
        shared = self.first[match_length]
        record.first.add(REQUEST_DECAY, first, shared.accepted / shared.baseline)
        shared.add(SHARED_DECAY, first, 1)
        if agreeing:
            tried = min(agreeing + 1, decided) - 1
            record.later.add(REQUEST_DECAY, agreeing - 1, tried)
            self.later.add(SHARED_DECAY, agreeing - 1, tried)

    def rates(self, record: NgramRecord, match_length: int) -> tuple[float, float]:
        """The acceptance rates of the first draft and of each later one, given those before."""
        if not match_length:
            return 0.0, 0.0
        shared = self.first[match_length]
        own = (record.first.accepted + SHARED_WEIGHT) / (record.first.baseline + SHARED_WEIGHT)
        first = own * shared.accepted / shared.baseline
        shared_later = self.later.accepted / self.later.baseline
        later = (record.later.accepted + SHARED_WEIGHT * shared_later) / (
            record.later.baseline + SHARED_WEIGHT
        )
        return min(first, MAX_RATE), min(later, MAX_RATE)


def expected_tokens(rates: tuple[float, float], k: int) -> float:
    """Tokens of a step that verifies k drafts: 1 + a (1 + b + b^2 + ...), for rates a and b.

    >>> expected_tokens((0.5, 0.5), 2)
    1.75
    """
    first, later = rates
    return 1 + first * (1 - later**k) / (1 - later)

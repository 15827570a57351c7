"""NgramPolicy: whether a request drafts by prompt lookup, and how many such drafts are verified.

It is used where the host knows the drafts before it chooses, which is on a CPU. Two decisions:

* At the end of a step a request drafts by prompt lookup if its match has at least `min_match`
  tokens: those from which on n-gram drafts are expected to give more tokens per second than the
  drafter's. If all requests of a pass do, the drafter only brings its KV cache up to date.
* A step that verifies such drafts verifies a chain of the length that is expected to give the most
  tokens per second, all requests of the pass together.

Steps without n-gram drafts are those of the policy of the drafter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from peagle.draft_shape import MAX_NGRAM, MIN_NGRAM, NO_DRAFT, DraftShape
from peagle.engine.ngram.acceptance import NgramAcceptance, NgramRecord, expected_tokens
from peagle.engine.ngram.ngram_draft import NgramDraft
from peagle.engine.ngram.ngram_step import NgramStep
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.draft_policy import DraftChoice, DraftPolicy
from peagle.engine.policy.step_costs import StepCosts

# The match length from which on n-gram drafts replace those of a drafter where nothing tells more.
DEFAULT_MIN_MATCH = 5
# N-gram drafts must be expected to be this much faster: where text repeats itself, the drafter
# accepts more than on average too.
MARGIN = 1.05
CHAIN_LENGTHS = (0, 3, 7, 11, 15)
# The cost of a row relative to a step without drafts, as long as no cost is known.
PRIOR_ROW_COST = 0.04
# Costs that were not measured are estimated from others, and taken for this much less, so that such
# lengths are tried.
OPTIMISM = 0.85
# A cost that was not measured in so many n-gram steps is estimated anew.
MAX_COST_AGE = 150


class NgramPolicy:
    def __init__(self, drafter_policy: DraftPolicy, max_k: int, has_drafter: bool) -> None:
        self.drafter_policy = drafter_policy
        self.has_drafter = has_drafter
        self.max_k = max_k
        self.lengths = (*(k for k in CHAIN_LENGTHS if k < max_k), max_k)
        self.acceptance = NgramAcceptance()
        # Of steps with n-gram drafts only, where the drafter drafts nothing.
        self.costs = StepCosts()
        self._steps: Counter[int] = Counter()  # by bucket
        self._last_run: dict[tuple[int, int], int] = {}  # (bucket, K) -> step

    @property
    def adaptive(self) -> AdaptivePolicy | None:
        policy = self.drafter_policy
        return policy if isinstance(policy, AdaptivePolicy) else None

    # --- which drafts -----------------------------------------------------------------------------

    def min_matches(self, batch: int, records: Sequence[NgramRecord]) -> list[int]:
        """The match length from which on each request drafts by prompt lookup."""
        if not self.has_drafter:
            return [0] * len(records)
        policy = self.adaptive
        if policy is None or not policy.seconds:
            return [DEFAULT_MIN_MATCH] * len(records)
        drafter_rate = max(
            policy.yields.chain_tokens[shape.k] / seconds
            for shape, seconds in policy.seconds.items()
        )
        costs = {k: self._seconds(batch, k) for k in self.lengths}
        return [self._min_match(record, costs, MARGIN * drafter_rate) for record in records]

    def _min_match(self, record: NgramRecord, costs: Mapping[int, float], needed: float) -> int:
        """`needed`: tokens per second that n-gram drafts must be expected to give."""
        enough = MAX_NGRAM + 1  # No match is as long: the drafter is faster.
        for length in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            rates = self.acceptance.rates(record, length)
            if max(expected_tokens(rates, k) / costs[k] for k in costs) < needed:
                break
            enough = length
        return enough

    # --- how many ---------------------------------------------------------------------------------

    def choose(
        self, batch: int, drafts: Sequence[tuple[NgramRecord, NgramDraft]], drafted: Sequence[int]
    ) -> DraftChoice:
        """The chain to verify; `drafts`: of the requests with n-gram drafts.

        `drafted`: the number of drafts of each of the others, which are the drafter's.
        """
        policy = self.adaptive
        if policy is None:
            return DraftChoice(DraftShape(self.max_k, self.max_k), "n-gram drafts")
        chain_tokens = policy.yields.chain_tokens
        rates = [self.acceptance.rates(record, draft.match_length) for record, draft in drafts]

        def tokens_per_second(k: int) -> float:
            tokens = sum(expected_tokens(each, k) for each in rates)
            tokens += sum(chain_tokens[min(k, own, len(chain_tokens) - 1)] for own in drafted)
            return tokens / self._seconds(batch, k)

        k = max(self.lengths, key=tokens_per_second)
        return DraftChoice(DraftShape(k, k), "fastest with n-gram drafts")

    def observe_drafts(self, step: NgramStep, emitted: Sequence[Sequence[int]]) -> None:
        """Learn what the n-gram drafts of a step accepted, or would have; `emitted`: its tokens."""
        for record, draft, tokens in zip(step.records, step.drafts, emitted, strict=True):
            if draft is not None:
                self.acceptance.observe(record, draft.match_length, draft.drafts, tokens)

    def observe(self, batch: int, k: int, seconds: float | None) -> None:
        """Learn the duration of a step with n-gram drafts only; None if it is not known."""
        bucket = self.costs.bucket(batch)
        self._steps[bucket] += 1
        for other in self.lengths:
            last = self._last_run.get((bucket, other), 0)
            if other and self._steps[bucket] - last > MAX_COST_AGE:
                self.costs.forget(batch, other)
        if seconds is not None:
            self._last_run[bucket, k] = self._steps[bucket]
            self.costs.add(batch, k, seconds)

    def observe_no_draft(self, batch: int, seconds: float) -> None:
        """Learn the duration of a step without drafts: n-grams do not change it."""
        self.costs.add(batch, NO_DRAFT.nodes, seconds)

    def _seconds(self, batch: int, k: int) -> float:
        """The cost of a step that verifies k n-gram drafts: measured, or estimated.

        Steps of many requests seldom have n-gram drafts only, and others are not measured here. The
        costs of smaller batches are too low for them; those of the drafter's chains are better.
        """
        seconds = self.costs.seconds(batch, k)
        if seconds is not None and self.costs.sample_count(batch, k):
            return seconds
        policy = self.adaptive
        if policy is not None and self.costs.measured_lengths(batch) < 2:
            chain_seconds = policy.costs.seconds(batch, k)
            if chain_seconds is not None:
                return chain_seconds
        if seconds is not None:
            return OPTIMISM * seconds
        plain = self.costs.seconds(batch, 0) or 1.0
        return plain * (1 + PRIOR_ROW_COST * k)

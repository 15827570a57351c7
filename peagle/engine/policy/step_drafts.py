"""StepDrafts: which drafts a step verifies and makes, and what the policies learn from it.

The drafter's policy chooses a shape. Where the host sees n-gram matches before it launches a step
(a CPU), the policy of n-grams may replace the drafts of some requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.batch import BatchEntry, mean_confidence, verifiable_shape
from peagle.engine.in_flight import InFlightPass
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.engine.ngram.ngram_step import NgramStep
from peagle.engine.ngram.policy import NgramPolicy
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.draft_policy import DraftChoice, DraftPolicy
from peagle.engine.step.stepper import Stepper


class StepShapes(NamedTuple):
    verified: DraftShape
    drafted: DraftShape  # For the next step.
    choice: DraftChoice  # Of the policy that decided what is verified.


class StepDrafts:
    def __init__(self, policy: DraftPolicy, ngram: NgramPolicy | None, stepper: Stepper) -> None:
        """`ngram`: where the host chooses between n-gram drafts and those of the drafter."""
        self.policy = policy
        self.ngram = ngram
        self.stepper = stepper

    def choose(self, entries: Sequence[BatchEntry], chains_only: bool, timed: bool) -> StepShapes:
        batch = len(entries)
        ngrams = [
            (entry.state.ngram_record, draft)
            for entry in entries
            if (draft := entry.state.ngram) is not None and draft.used
        ]
        others = [entry for entry in entries if not entry.uses_ngram]
        confidence = mean_confidence(others) if others else None
        choice = self.policy.choose(batch, confidence, chains_only, timed=timed and not ngrams)
        drafted = choice.shape
        if ngrams and self.ngram is not None:
            choice = self.ngram.choose(batch, ngrams, [e.state.draft_shape.k for e in others])
            return StepShapes(choice.shape, drafted, choice)
        verified = verifiable_shape(drafted, [entry.state.draft_shape for entry in entries])
        return StepShapes(verified, drafted, choice)

    def start_ngram_step(self, entries: Sequence[BatchEntry]) -> NgramStep | None:
        """Tell the stepper which matches are long enough; returns what this step verifies."""
        ngram_slots = self.stepper.slots.ngram
        if self.ngram is None or not isinstance(ngram_slots, HostNgramSlots):
            return None
        states = [entry.state for entry in entries]
        records = [state.ngram_record for state in states]
        min_matches = self.ngram.min_matches(len(entries), records)
        ngram_slots.set_min_match([entry.slot for entry in entries], min_matches)
        return NgramStep(
            records,
            [state.ngram for state in states],
            [state.draft_shape.k for state in states],
            self.stepper.drafter is not None,
        )

    def read_ngrams(self, entries: Sequence[BatchEntry]) -> None:
        """Learn which requests have n-gram drafts for the next step."""
        ngram_slots = self.stepper.slots.ngram
        if self.ngram is None or not isinstance(ngram_slots, HostNgramSlots):
            return
        drafts = ngram_slots.read([entry.slot for entry in entries])
        for entry, draft in zip(entries, drafts, strict=True):
            entry.state.ngram = draft

    def observe(
        self, launched: InFlightPass, seconds: float, accepted: list[AcceptedCounts | None]
    ) -> None:
        """Learn from a step that was read back: its duration, and what was accepted."""
        batch = len(launched.requests)
        timed_seconds = seconds if launched.timed else None
        if self.ngram is not None and launched.ngram is not None:
            self.ngram.observe_drafts(launched.ngram, launched.output.unpack().tokens)
            if any(launched.ngram.used):
                self.ngram.observe(batch, launched.shape.k, timed_seconds)
                k, live = launched.ngram.drafter_counts(launched.shape.k, accepted)
                if live and launched.ngram.has_drafter:
                    self.policy.observe(batch, DraftShape(k, k), None, live)
                return
            if timed_seconds is not None and launched.shape == NO_DRAFT:
                self.ngram.observe_no_draft(batch, timed_seconds)
        live = [counts for counts in accepted if counts is not None]
        if live:
            self.policy.observe(batch, launched.shape, timed_seconds, live)

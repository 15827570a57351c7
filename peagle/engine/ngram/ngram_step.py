"""NgramStep: what prompt lookup proposed to the requests of one decode step, on a CPU."""

from dataclasses import dataclass

from peagle.engine.ngram.acceptance import NgramRecord
from peagle.engine.ngram.ngram_draft import NgramDraft
from peagle.engine.policy.accepted import AcceptedCounts


@dataclass(slots=True)
class NgramStep:
    """One entry for each request in all lists."""

    records: list[NgramRecord]
    drafts: list[NgramDraft | None]
    drafted: list[int]  # Drafts in the drafter's chains.
    has_drafter: bool
    # Whether the drafter drafted nothing for the next step, because all requests have n-grams.
    catches_up: bool = False

    @property
    def used(self) -> list[bool]:
        """Whether the drafts of a request are n-grams."""
        return [draft is not None and draft.used for draft in self.drafts]

    @property
    def draft_counts(self) -> list[int]:
        """The number of drafts of each request."""
        return [
            len(draft.drafts) if draft is not None and draft.used else drafted
            for draft, drafted in zip(self.drafts, self.drafted, strict=True)
        ]

    @property
    def is_pure(self) -> bool:
        """Whether the cost of the step is that of n-gram drafts alone."""
        return not self.has_drafter or (self.catches_up and all(self.used))

    def drafter_counts(
        self, k: int, accepted: list[AcceptedCounts | None]
    ) -> tuple[int, list[AcceptedCounts]]:
        """The number of the drafter's drafts that were verified, and what was accepted of them."""
        rows = [
            (drafted, counts)
            for drafted, counts, used in zip(self.drafted, accepted, self.used, strict=True)
            if counts is not None and not used
        ]
        k = min([k, *(drafted for drafted, _ in rows)])
        return k, [
            AcceptedCounts(min(counts.accepted, k), min(counts.chain, k)) for _, counts in rows
        ]

"""The requests of one pass, and what they ask for together."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.draft_shape import DraftShape
from peagle.engine.request_state import RequestState
from peagle.engine.sampling.grammar_masks import GrammarMasks
from peagle.engine.schedule.request import Request


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A request in a pass; it stays valid if the request is aborted before the launch."""

    request: Request
    state: RequestState
    slot: int

    @property
    def uses_ngram(self) -> bool:
        """Whether the drafts of the next step come from prompt lookup; the host knows on a CPU."""
        return self.state.ngram is not None and self.state.ngram.used


def grammar_masks(entries: Sequence[BatchEntry]) -> GrammarMasks | None:
    """The masks of the requests with a grammar or a thinking part; None if there are none."""
    constrained = [
        (row, entry.state.constraint)
        for row, entry in enumerate(entries)
        if entry.state.constraint is not None
    ]
    return GrammarMasks(constrained) if constrained else None


def max_logprobs(entries: Sequence[BatchEntry]) -> int | None:
    """The most log-probabilities that a request asks for, at least 1; None if none asks."""
    counts = [n for entry in entries if (n := entry.request.limits.logprobs) is not None]
    return max(*counts, 1) if counts else None


def mean_confidence(entries: Sequence[BatchEntry]) -> list[float] | None:
    """The mean draft confidence by position, up to the shortest; None if a request has none."""
    known = [
        confidence for entry in entries if (confidence := entry.state.draft_confidence) is not None
    ]
    if len(known) < len(entries):
        return None
    return [sum(column) / len(column) for column in zip(*known, strict=False)]


def verifiable_shape(requested: DraftShape, drafted: Sequence[DraftShape]) -> DraftShape:
    """The largest part of `requested` that all requests have drafts for: a tree, or else a chain.

    Drafts may be left unused: a small tree is the beginning of a larger one, and so is a chain.
    """
    if not requested.is_chain and not any(shape.is_chain for shape in drafted):
        return DraftShape(requested.k, min(requested.nodes, *(shape.nodes for shape in drafted)))
    k = min(requested.k, *(shape.k for shape in drafted))
    return DraftShape(k, k)

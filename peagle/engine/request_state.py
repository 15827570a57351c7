"""RequestState: what the engine keeps of a live request, in addition to the scheduler."""

from dataclasses import dataclass, field

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.ngram.acceptance import NgramRecord
from peagle.engine.ngram.ngram_draft import NgramDraft
from peagle.engine.sampling.grammar_masks import AnswerConstraint
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.engine.stream import Stream


@dataclass(slots=True)
class RequestState:
    stream: Stream
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    constraint: AnswerConstraint | None = None  # None: the target chooses freely.
    slot: int | None = None  # None: the request is not running.
    sampling_state: SamplingState | None = None
    # The drafts that the next step may verify; a tree includes the chain of its depth.
    draft_shape: DraftShape = NO_DRAFT
    draft_confidence: list[float] | None = None  # The drafter's estimate for each of them.
    ngram: NgramDraft | None = None  # What prompt lookup found for the next step, on a CPU.
    ngram_record: NgramRecord = field(default_factory=NgramRecord)
    known_pages: int = 0  # Pages in the slot's page table on the device.

    def cut(self, tokens: list[int]) -> tuple[list[int], bool]:
        """Cut tokens after a stop token or the end of the grammar; also whether there was one."""
        stopped = not self.stop_ids.isdisjoint(tokens)
        if stopped:
            end = next(i + 1 for i, token in enumerate(tokens) if token in self.stop_ids)
            tokens = tokens[:end]
        constraint = self.constraint
        if constraint is None:
            return tokens, stopped
        used = constraint.consume(tokens)
        if constraint.is_over:
            self.constraint = None
        return tokens[:used], constraint.terminated or stopped

    def shown(self, tokens: list[int]) -> list[int]:
        """The part of cut tokens whose text belongs to the answer, as in vLLM.

        A stop token counts as a token of the answer, but its text is shown only with
        `include_stop`.
        """
        if self.detokenizer.include_stop or self.stop_ids.isdisjoint(tokens[-1:]):
            return tokens
        return tokens[:-1]

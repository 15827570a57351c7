"""BatchSampling: how the requests of one pass choose their tokens."""

from dataclasses import dataclass

from peagle.engine.sampling.grammar_masks import GrammarMasks
from peagle.engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class BatchSampling:
    sampler: Sampler | None = None  # None: every request takes the argmax of the raw logits.
    masks: GrammarMasks | None = None  # None: no request has a grammar.
    top_logprobs: int | None = None  # Log-probabilities of this many likely tokens; None: off.

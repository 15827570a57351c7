"""GenerationParams: what one request asks an engine for, besides its prompt."""

from dataclasses import dataclass, field

from peagle.core import Sampling
from peagle.engine.thinking import Thinking
from peagle.server.messages import ProbedGrammar


@dataclass(frozen=True, slots=True)
class GenerationParams:
    max_tokens: int
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None  # Number of alternatives per token; None: no log-probabilities.
    grammar: ProbedGrammar | None = None
    user: str = ""
    cache_salt: str = ""  # Requests with different salts share no prefixes.
    thinking: Thinking | None = None  # None: no budget, and a grammar binds the whole answer.
    shows_special_tokens: bool = False  # The text contains special tokens, but no stop tokens.
    learn: bool = False  # The request and its answer may be stored.

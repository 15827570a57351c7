"""Admission: the checks at the engine's door, and what a new request needs before it is queued."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from peagle.core import Sampling
from peagle.engine.detokenizer import Detokenizer, TokenDecoder, token_decoder
from peagle.engine.request_state import RequestState
from peagle.engine.sampling.grammar_masks import AnswerConstraint, GrammarState
from peagle.engine.sampling.sampling_state import check_logit_bias
from peagle.engine.sampling.thinking_state import ThinkingState
from peagle.engine.schedule.prompt_rules import PromptRules
from peagle.engine.schedule.request import Request, RequestLimits
from peagle.engine.stream import Stream
from peagle.engine.thinking import Thinking
from peagle.errors import UserError
from peagle.grammar import CompiledGrammar, Grammar
from peagle.model_pair import ModelPair


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller asks for, in addition to the prompt."""

    sampling: Sampling
    limits: RequestLimits
    include_stop: bool = False  # The text of the answer includes the stop string or stop token.
    grammar: Grammar | CompiledGrammar | None = None
    user: str = ""
    id: str | None = None  # None: the engine chooses one.
    cache_salt: str = ""  # Requests with different salts share no KV pages.
    detokenize: bool = True  # False: the caller decodes the tokens, and finds stop strings.
    thinking: Thinking | None = None  # Its budget, and where a grammar begins.

    def __post_init__(self) -> None:
        if self.limits.stop and not self.detokenize:
            raise UserError("`stop` needs text: leave out `detokenize`, or search for it yourself")
        if self.grammar is not None and self.limits.ignore_eos:
            raise UserError(
                "`ignore_eos` does not work with a grammar, which ends the answer: leave it out"
            )


class Admission:
    def __init__(self, pair: ModelPair, rules: PromptRules) -> None:
        self.pair = pair
        self.rules = rules
        tokenizer = pair.target.tokenizer
        self._decoder = None if tokenizer is None else token_decoder(tokenizer)
        self._ids = itertools.count()

    def prepare(
        self, prompt: list[int], options: RequestOptions, abort: Callable[[Request], None]
    ) -> tuple[Request, RequestState]:
        """Check a request, and build its state; `abort`: called by its stream."""
        self.rules.check(prompt)
        check_logit_bias(options.sampling, self.rules.vocab_size)
        limits = self._bounded(options.limits, len(prompt))
        detokenizer = Detokenizer(
            self._decoder if options.detokenize else None,
            limits.stop,
            options.include_stop,
            limits.min_tokens,
        )
        stop_ids = limits.stop_ids
        if not limits.ignore_eos:
            stop_ids |= self.pair.target.stop_ids
        constraint = self._constraint(options, stop_ids, limits.min_tokens)
        id = options.id or f"r{next(self._ids)}"
        request = Request(
            id, prompt, options.sampling, limits, options.user, cache_salt=options.cache_salt
        )
        stream = Stream(id, len(prompt), partial(abort, request), request.output)
        return request, RequestState(stream, detokenizer, stop_ids, constraint)

    def _constraint(
        self, options: RequestOptions, stop_ids: frozenset[int], min_tokens: int
    ) -> AnswerConstraint | None:
        grammar = None
        if options.grammar is not None:
            compiled = self._compile(options.grammar)
            executor = self.pair.grammars.executor
            grammar = GrammarState(compiled, executor, stop_ids, min_tokens)
        thinking = options.thinking
        if thinking is None or (thinking.budget is None and grammar is None):
            return grammar
        if self._special_decoder is None:
            raise UserError("`thinking` needs a tokenizer: leave it out")
        thinking.check_tokens(self.rules.vocab_size, stop_ids if min_tokens else frozenset())
        decode = self._special_decoder.decode
        return ThinkingState(thinking, lambda token: decode([token]), grammar, sorted(stop_ids))

    @cached_property
    def _special_decoder(self) -> TokenDecoder | None:
        """Decodes special tokens too: a marker may be one."""
        tokenizer = self.pair.target.tokenizer
        return None if tokenizer is None else token_decoder(tokenizer, skip_special_tokens=False)

    def _compile(self, grammar: Grammar | CompiledGrammar) -> CompiledGrammar:
        """A server compiles grammars before, because this would hold up its event loop."""
        if isinstance(grammar, CompiledGrammar):
            return grammar
        return self.pair.grammars.compile(grammar)

    def _bounded(self, limits: RequestLimits, prompt_tokens: int) -> RequestLimits:
        """The limits of an answer that fits into the context."""
        room = self.rules.context - prompt_tokens
        return replace(
            limits,
            max_tokens=min(limits.max_tokens, room),
            min_tokens=min(limits.min_tokens, room),
        )

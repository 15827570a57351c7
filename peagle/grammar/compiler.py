"""GrammarCompiler: compiles grammars for a target, and caches them."""

from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from peagle.grammar.grammar import Grammar
from peagle.grammar.matcher import (
    MAX_PARSER_ITEMS,
    Vocabulary,
    build_matcher,
    require_llguidance,
    try_answer,
)

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from peagle.target import Target

CACHE_CHARS = 1 << 20  # Compiled grammars are kept up to this many characters of their texts.
CACHE_BYTES = 1 << 28  # And up to this much memory, as far as it was measured.
MIN_ENTRY_CHARS = 1 << 12  # A shorter grammar counts as this many.


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """A grammar that is ready to be followed; requests carry it to their engine."""

    grammar: Grammar
    matcher: "LLMatcher"  # Never advanced: each request has its own copy.
    memory_bytes: int = 0  # 0: not measured.

    def new_matcher(self) -> "LLMatcher":
        """A matcher at the beginning of an answer; copies share what was compiled."""
        return self.matcher.deep_copy()


class GrammarCompiler:
    """All methods are thread-safe."""

    def __init__(
        self,
        target: "Target",
        cache_chars: int = CACHE_CHARS,
        cache_bytes: int = CACHE_BYTES,
        max_parser_items: int = MAX_PARSER_ITEMS,
    ) -> None:
        self._target = target
        self._cache_chars = cache_chars
        self._cache_bytes = cache_bytes
        self._max_parser_items = max_parser_items
        self._lock = Lock()
        # The most recently used one comes last.
        self._cache: dict[Grammar, CompiledGrammar] = {}
        self._live: WeakSet[CompiledGrammar] = WeakSet()  # Cached, or held by a request.

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar in the calling thread, or return the cached result.

        There is no time limit: `GrammarProbe` tries the grammars of strangers in a process of
        their own first.
        """
        compiled = self.cached(grammar)
        if compiled is not None:
            return compiled
        grammar.check()
        matcher = build_matcher(self.tokenizer, grammar, self._max_parser_items)
        try_answer(matcher, self.tokenizer, self.vocabulary.stop_ids)
        return self._keep(CompiledGrammar(grammar, matcher))

    def compile_probed(
        self, grammar: Grammar, probed: Grammar, memory_bytes: int
    ) -> CompiledGrammar:
        """Compile what a GrammarProbe has accepted: `probed`, in its place of `grammar`."""
        matcher = build_matcher(self.tokenizer, probed, self._max_parser_items)
        return self._keep(CompiledGrammar(grammar, matcher, memory_bytes))

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._cache.pop(grammar, None)
            if compiled is not None:
                self._cache[grammar] = compiled
            return compiled

    def make_room(self, memory_bytes: int, limit_bytes: int) -> bool:
        """Drop cached grammars until all live ones and a new one fit the limit, if they can."""
        with self._lock:
            while self.live_bytes + memory_bytes > limit_bytes and self._cache:
                self._cache.pop(next(iter(self._cache)))
            return self.live_bytes + memory_bytes <= limit_bytes

    @property
    def live_bytes(self) -> int:
        """The measured memory of all grammars that are cached or held by a request."""
        return sum(compiled.memory_bytes for compiled in self._live)

    def _keep(self, compiled: CompiledGrammar) -> CompiledGrammar:
        with self._lock:
            self._live.add(compiled)
            self._cache.pop(compiled.grammar, None)
            self._cache[compiled.grammar] = compiled
            while len(self._cache) > 1 and self._cache_is_full():
                self._cache.pop(next(iter(self._cache)))
        return compiled

    def _cache_is_full(self) -> bool:
        chars = sum(max(len(grammar.text), MIN_ENTRY_CHARS) for grammar in self._cache)
        memory_bytes = sum(compiled.memory_bytes for compiled in self._cache.values())
        return chars > self._cache_chars or memory_bytes > self._cache_bytes

    @cached_property
    def executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        require_llguidance()
        return Vocabulary.of(self._target)

    @cached_property
    def tokenizer(self) -> "LLTokenizer":
        return self.vocabulary.tokenizer()

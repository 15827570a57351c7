"""ProbedGrammars: the grammars that the probe has accepted.

Grammars are probed here, in front, and compiled where their masks are computed.
"""

from functools import cached_property
from types import SimpleNamespace
from typing import Any

from peagle.grammar import Grammar
from peagle.grammar.matcher import Vocabulary
from peagle.server.messages import ProbedGrammar

CACHE_ENTRIES = 256


class ProbedGrammars:
    def __init__(
        self, name: str, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]
    ) -> None:
        self._target: Any = SimpleNamespace(
            name=name, tokenizer=tokenizer, vocab_size=vocab_size, stop_ids=stop_ids
        )
        self._cache: dict[Grammar, ProbedGrammar] = {}

    def cached(self, grammar: Grammar) -> ProbedGrammar | None:
        return self._cache.get(grammar)

    def add(self, grammar: Grammar, probed: Grammar, memory_bytes: int) -> ProbedGrammar:
        """Remember a grammar that the probe has accepted."""
        entry = ProbedGrammar(grammar, probed, memory_bytes)
        while len(self._cache) >= CACHE_ENTRIES:
            self._cache.pop(next(iter(self._cache)))
        self._cache[grammar] = entry
        return entry

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._target)

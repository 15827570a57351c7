"""Grammars that answers must follow, and their compilation for one target by llguidance.

    Grammar -> GrammarCompiler.matcher (compiled once, copied for each request) -> engine/sampling

llguidance comes with the extra `serve`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from peagle.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from peagle.target import Target

MAX_GRAMMAR_CHARS = 1 << 18
CACHE_CHARS = 1 << 20  # Compiled grammars are kept up to this many characters of their texts.
MIN_ENTRY_CHARS = 1 << 12  # A shorter grammar counts as this many.
# Items of one parser step, which holds up all requests; five times as many take half a second.
MAX_PARSER_ITEMS = 10_000
TRIAL_TOKENS = 16  # Tokens of a trial answer, generated before a grammar is accepted.
MAX_ERROR_CHARS = 400
# Whitespace between JSON tokens; with no upper bound, small targets write nothing else.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: Literal["json", "regex", "lark"]
    text: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None) -> "Grammar":
        """Answers that follow a JSON schema; without one, any JSON object."""
        if schema is False:
            raise UserError(
                "the schema false allows nothing: use true for any JSON, or another schema"
            )
        if isinstance(schema, str):
            return cls("json", schema)
        if schema is None:
            schema = {"type": "object"}
        elif schema is True:
            schema = {}
        return cls("json", json.dumps(schema, ensure_ascii=False))

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Answers that are one of these texts."""
        if not texts or not all(texts):
            raise UserError("a choice needs at least one text to choose from, and no empty ones")
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        # One terminal, because llguidance does not accept thousands of rules.
        return cls("lark", f"start: TEXT\nTEXT: {quoted}")

    @classmethod
    def ebnf(cls, rules: str) -> "Grammar":
        """Answers that follow rules in Lark's notation, or in GBNF."""
        require_llguidance()
        check_grammar_length(rules)
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return cls("lark", any_to_lark(rules))
        except Exception as error:  # The converter raises errors of many types.
            raise UserError(f"the grammar cannot be read: {error}") from error

    def __post_init__(self) -> None:
        check_grammar_length(self.text)


class GrammarCompiler:
    """Compiles grammars for a target's tokenizer, and caches them. All methods are thread-safe."""

    def __init__(
        self,
        target: "Target",
        cache_chars: int = CACHE_CHARS,
        max_parser_items: int = MAX_PARSER_ITEMS,
    ) -> None:
        self._target = target
        self._cache_chars = cache_chars
        self._max_parser_items = max_parser_items
        self._lock = Lock()
        self._cache: dict[Grammar, LLMatcher] = {}  # The most recently used one comes last.

    def matcher(self, grammar: Grammar) -> "LLMatcher":
        """A new matcher at the beginning of an answer."""
        with self._lock:
            cached = self._cache.get(grammar)
        compiled = cached or self._compile(grammar)
        with self._lock:
            self._cache.pop(grammar, None)
            self._cache[grammar] = compiled
            while len(self._cache) > 1 and self._cached_chars() > self._cache_chars:
                self._cache.pop(next(iter(self._cache)))
        return compiled.deep_copy()

    def _cached_chars(self) -> int:
        return sum(max(len(grammar.text), MIN_ENTRY_CHARS) for grammar in self._cache)

    @cached_property
    def executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        """llguidance's view of the vocabulary; building it takes half a second to a second."""
        require_llguidance()
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer, decoders

        target = self._target
        backend = getattr(target.tokenizer, "backend_tokenizer", None)
        if backend is None or not target.stop_ids:
            raise UserError(
                f"a grammar needs a fast tokenizer and an end token, which {target.name!r} lacks"
            )
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_padding()
        backend.no_truncation()
        # Tokenizers of GGUF files have ByteLevel after other steps, where llguidance misses it.
        if "ByteLevel" in str(backend.decoder):
            backend.decoder = decoders.ByteLevel()
        try:
            return LLTokenizer(
                backend.to_str(), n_vocab=target.vocab_size, eos_token=sorted(target.stop_ids)
            )
        except ValueError as error:
            raise UserError(
                f"the tokenizer of {target.name!r} does not support grammars: {error}"
            ) from error

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        require_llguidance()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, step_max_items=self._max_parser_items)
        try:
            tokenizer = self._tokenizer
            rules = llguidance_grammar(grammar)
            matcher = LLMatcher(tokenizer, rules, log_level=0, limits=limits)
            problem = self._try_answer(matcher.deep_copy())
        except ValueError as error:
            problem = str(error)
        if problem:
            raise UserError(f"the grammar cannot be used: {clean_error_text(problem)}")
        return matcher

    def _try_answer(self, matcher: "LLMatcher") -> str:
        """Begin an answer with the first allowed tokens; return the problem that shows, or ""."""
        stop_mask = sum(1 << stop for stop in self._target.stop_ids)
        for _ in range(TRIAL_TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not allowed:
                break
            candidates = allowed & ~stop_mask or allowed
            token = (candidates & -candidates).bit_length() - 1
            if not matcher.consume_token(token) and self._tokenizer.is_special_token(token):
                text = self._target.tokenizer.convert_ids_to_tokens(token)
                return f"it asks for {text!r}, which is a special token and no text: leave it out"
            if matcher.is_stopped():
                break
        return matcher.get_error()


def llguidance_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own format."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def clean_error_text(text: str) -> str:
    """An error of llguidance on one line of bounded length."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARS]


def check_grammar_length(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise UserError(
            f"the grammar has {len(text):,} characters, and at most {MAX_GRAMMAR_CHARS:,} are"
            " supported: make it smaller"
        )


def require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise UserError("a grammar needs llguidance: pip install 'peagle[serve]'")

"""A grammar: what an answer must look like; and grammars compiled for one target, by llguidance (of the extra `serve`).

Grammar -> Grammars.matcher (compiled once, copied for each request) -> engine/binding.py
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

MAX_GRAMMAR_CHARS = 1 << 18  # characters
CACHE_CHARS, MIN_ENTRY_CHARS = (
    1 << 20,
    1 << 12,
)  # characters of the grammars that are kept compiled; what a short one counts as
MAX_PARSER_ITEMS = (
    10_000  # of a parser's step: it holds everybody up, and five times as many take half a second
)
TRIAL_TOKENS = 16  # tokens of an answer that is tried before the grammar is let in
MAX_ERROR_CHARS = 400  # characters of what the library says
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"  # between JSON's tokens: with no end to it, small targets write nothing else


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: Literal["json", "regex", "lark"]
    text: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None) -> "Grammar":
        """Of a JSON schema; without one, any JSON object."""
        if schema is False:
            raise UserError(
                "the schema false allows nothing: use true for any JSON, or another schema"
            )
        schema = {"type": "object"} if schema is None else {} if schema is True else schema
        return cls(
            "json", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        )

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        if not texts or not all(texts):
            raise UserError("a choice needs texts to choose from, none of them empty")
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls(
            "lark", f"start: TEXT\nTEXT: {quoted}"
        )  # one terminal: thousands of rules are too many

    @classmethod
    def ebnf(cls, rules: str) -> "Grammar":
        """Lark's notation, or GBNF."""
        require_llguidance()
        check_grammar_length(rules)
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return cls("lark", any_to_lark(rules))
        except Exception as error:  # the converter raises whatever it stumbles over
            raise UserError(f"the grammar cannot be read: {error}") from error

    def __post_init__(self) -> None:
        check_grammar_length(self.text)


class GrammarCompiler:
    """Compiled once for a target's tokenizer; every method may be called from any thread."""

    def __init__(self, target: "Target") -> None:
        self._target = target
        self._lock = Lock()
        self._kept: dict[Grammar, LLMatcher] = {}  # the one used last comes last

    def matcher(self, grammar: Grammar) -> "LLMatcher":
        """At the beginning of an answer; of its own."""
        with self._lock:
            found = self._kept.get(grammar)
        compiled = found or self._compile(grammar)
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = compiled
            while (
                len(self._kept) > 1 and sum(max(len(one.text), MIN_ENTRY_CHARS) for one in self._kept) > CACHE_CHARS
            ):
                self._kept.pop(next(iter(self._kept)))
        return compiled.deep_copy()

    @cached_property
    def executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """Half a second to a second."""
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
        if "ByteLevel" in str(
            backend.decoder
        ):  # GGUF files have it behind others, where it is overlooked
            backend.decoder = decoders.ByteLevel()
        try:
            return LLTokenizer(
                backend.to_str(), n_vocab=target.vocab_size, eos_token=sorted(target.stop_ids)
            )
        except ValueError as error:
            raise UserError(
                f"the tokenizer of {target.name!r} cannot be bound to a grammar: {error}"
            ) from error

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        require_llguidance()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, step_max_items=MAX_PARSER_ITEMS)
        try:
            matcher = LLMatcher(self._vocabulary, llguidance_grammar(grammar), log_level=0, limits=limits)
            reason = self._try(matcher.deep_copy())
        except ValueError as error:
            reason = str(error)
        if reason:
            raise UserError(f"the grammar cannot be used: {clean_error_text(reason)}")
        return matcher

    def _try(self, matcher: "LLMatcher") -> str:
        """What is wrong, if that is found by beginning an answer: with the first token of all that are allowed."""
        stops = sum(1 << stop for stop in self._target.stop_ids)
        for _ in range(TRIAL_TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not allowed:
                break
            rest = allowed & ~stops or allowed
            token = (rest & -rest).bit_length() - 1
            if not matcher.consume_token(token) and self._vocabulary.is_special_token(token):
                text = self._target.tokenizer.convert_ids_to_tokens(token)
                return f"it wants {text!r}, which is no text but a token of its own: leave it out"
            if matcher.is_stopped():
                break
        return matcher.get_error()


def llguidance_grammar(grammar: Grammar) -> str:
    """As llguidance writes them."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    return (
        LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    )(grammar.text)


def clean_error_text(reason: str) -> str:
    """What the library says of an error."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARS]


def check_grammar_length(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise UserError(
            f"the grammar has {len(text):,} characters, the most is {MAX_GRAMMAR_CHARS:,}: make it smaller"
        )


def require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise UserError("a grammar needs llguidance: pip install 'peagle[serve]'")

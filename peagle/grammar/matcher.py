"""Matchers of llguidance: the vocabulary that they choose from, how they are built and tried."""

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.grammar.grammar import MAX_GRAMMAR_CHARS, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from peagle.target import Target

# Items of one parser step, which holds up all requests; five times as many take half a second.
MAX_PARSER_ITEMS = 10_000
TRIAL_TOKENS = 16  # Tokens of a trial answer, generated before a grammar is accepted.
MAX_ERROR_CHARS = 400
# Whitespace between JSON tokens; with no upper bound, small targets write nothing else.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a target, in a form that can be sent to another process."""

    name: str | None  # The target's, for error messages.
    tokenizer_json: str
    size: int
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, target: "Target") -> "Vocabulary":
        from tokenizers import Tokenizer, decoders

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
        stop_ids = tuple(sorted(target.stop_ids))
        return cls(target.name, backend.to_str(), target.vocab_size, stop_ids)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Vocabulary":
        fields = json.loads(text)
        return cls(**fields | {"stop_ids": tuple(fields["stop_ids"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def tokenizer(self) -> "LLTokenizer":
        """llguidance's view of the vocabulary; building it takes half a second to a second."""
        require_llguidance()
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(
                self.tokenizer_json, n_vocab=self.size, eos_token=list(self.stop_ids)
            )
        except ValueError as error:
            raise UserError(
                f"the tokenizer of {self.name!r} does not support grammars: {error}"
            ) from error


def build_matcher(
    tokenizer: "LLTokenizer", grammar: Grammar, max_parser_items: int = MAX_PARSER_ITEMS
) -> "LLMatcher":
    """A matcher at the beginning of an answer; UserError: llguidance cannot use the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, step_max_items=max_parser_items)
    try:
        matcher = LLMatcher(tokenizer, llguidance_grammar(grammar), log_level=0, limits=limits)
        problem = matcher.get_error()
    except ValueError as error:
        problem = str(error)
    if problem:
        raise unusable(problem)
    return matcher


def try_answer(matcher: "LLMatcher", tokenizer: "LLTokenizer", stop_ids: tuple[int, ...]) -> None:
    """Begin an answer with the first allowed tokens; UserError: the problem that shows."""
    matcher = matcher.deep_copy()
    stop_mask = sum(1 << stop for stop in stop_ids)
    for _ in range(TRIAL_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not allowed:
            break
        candidates = allowed & ~stop_mask or allowed
        token = (candidates & -candidates).bit_length() - 1
        if not matcher.consume_token(token) and tokenizer.is_special_token(token):
            text = tokenizer.decode_str([token])
            raise unusable(
                f"it asks for {text!r}, which is a special token and no text: leave it out"
            )
        if matcher.is_stopped():
            break
    if problem := matcher.get_error():
        raise unusable(problem)


def llguidance_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own format."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(lark_of(grammar).text)


def lark_of(grammar: Grammar) -> Grammar:
    """The grammar with rules of EBNF in Lark's notation; others are returned unchanged."""
    if grammar.kind != "ebnf":
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Grammar("lark", any_to_lark(grammar.text))
    except UserError as error:
        raise UserError(
            f"the grammar has more than {MAX_GRAMMAR_CHARS:,} characters in Lark's notation:"
            " make it smaller"
        ) from error
    except Exception as error:  # The converter raises errors of many types.
        raise UserError(f"the grammar cannot be read: {clean_error_text(str(error))}") from error


def unusable(problem: str) -> UserError:
    return UserError(f"the grammar cannot be used: {clean_error_text(problem)}")


def clean_error_text(text: str) -> str:
    """An error of llguidance on one line of bounded length."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARS]


def require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise UserError("a grammar needs llguidance: pip install 'peagle[serve]'")

"""ToolFormat: how the answers of a family of targets write tool calls."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from peagle.grammar import Grammar
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.tool import Tool, ToolChoice

NO_ADDED_TOKENS: Mapping[str, int] = MappingProxyType({})


class ToolFormat(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that delimit calls. The parser must see them even if they are special tokens."""

    @property
    def shows_special_tokens(self) -> bool:
        """Whether markers are special tokens, which the text for the parser must contain."""

    def parser(self, tools: Sequence[Tool], streams_arguments: bool) -> AnswerParser:
        """A parser for one answer.

        Without `streams_arguments`, a call is held back until it is complete and valid; one that
        is not becomes content, verbatim. With it, a grammar guarantees that calls are valid, and
        arguments are given as they arrive.
        """

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        added_tokens: Mapping[str, int] = NO_ADDED_TOKENS,
    ) -> Grammar | None:
        """What an answer, after any reasoning, must follow; None: nothing binds it.

        `added_tokens` are all added tokens of the tokenizer with their ids, special or not:
        llguidance does not spell those as text.
        """

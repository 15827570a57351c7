"""AnswerFormat: how a target writes tool calls and reasoning, from options or its chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError

from peagle.engine.thinking import Thinking
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.target_text import TargetText
from peagle.server.parsing.answer_parser import AnswerParser, PlainParser
from peagle.server.parsing.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    detect_reasoning,
    find_reasoning_format,
)
from peagle.server.parsing.tool import Tool
from peagle.server.parsing.tool_format import ToolFormat
from peagle.server.parsing.tool_formats import TOOL_FORMATS, detect_tool_format, find_tool_format

DEFAULT_TOOL_FORMAT = "hermes"
HARMONY = "harmony"
# The first end leads to the text of the answer, the other one to a call or to more text.
HARMONY_ENDS = ("<|channel|>final<|message|>", "<|channel|>commentary")
HARMONY_FORCED_END = f"<|end|><|start|>assistant{HARMONY_ENDS[0]}"
HARMONY_HEADER_TOKENS = 3  # <|channel|>, analysis and <|message|> are not thoughts.
NO_REASONING = "none"  # Value of --reasoning-parser.


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    tools: ToolFormat
    reasoning: ReasoningFormat | None
    template_shows_tools: bool  # False: the server describes them in the system message.
    added_tokens: Mapping[str, int]
    special_tokens: frozenset[str]
    start_ids: tuple[int, ...] = ()  # Tokens that begin reasoning.
    forced_end: tuple[int, ...] = ()  # Tokens that end reasoning, with newlines around the tag.

    @property
    def is_harmony(self) -> bool:
        """Whether every answer consists of channels, also without tools and reasoning."""
        return self.tools.name == HARMONY

    def parser(
        self, tools: Sequence[Tool], streams_arguments: bool, thinks_first: bool
    ) -> AnswerParser:
        """The parser of one answer; `thinks_first`: the prompt ends in an open thinking part."""
        parser: AnswerParser = PlainParser()
        if tools or self.is_harmony:
            parser = self.tools.parser(tools, streams_arguments)
        if self.reasoning is None:
            return parser
        return ReasoningParser(self.reasoning, parser, thinks_first)

    def is_thinking(self, prompt_ending: str) -> bool:
        """Whether the prompt, which ends like this, has opened a thinking part."""
        return self.reasoning is not None and prompt_ending.rstrip().endswith(self.reasoning.start)

    def thinking(self, prompt_ending: str, budget: int | None) -> Thinking | None:
        """The thinking part of the answer; None: there is none, or the prompt has closed it."""
        reasoning = self.reasoning
        if self.is_harmony:
            if budget is not None:
                budget += HARMONY_HEADER_TOKENS
            return Thinking(HARMONY_ENDS, self.forced_end, starts_inside=True, budget=budget)
        if reasoning is None or prompt_ending.rstrip().endswith(reasoning.end):
            return None
        return Thinking(
            (reasoning.end,),
            self.forced_end,
            reasoning.start,
            self.start_ids,
            self.is_thinking(prompt_ending),
            budget,
        )

    def shows_special_tokens(self, has_tools: bool) -> bool:
        """Whether the text of an answer must contain special tokens, for its parser."""
        markers: set[str] = set()
        if self.reasoning is not None:
            markers |= {self.reasoning.start, self.reasoning.end}
        if has_tools or self.is_harmony:
            if self.tools.shows_special_tokens:
                return True
            markers |= set(self.tools.markers)
        return not markers.isdisjoint(self.special_tokens)


def answer_format(backend: EngineBackend) -> AnswerFormat:
    settings = backend.settings
    text = backend.engines.require_text()
    return find_answer_format(text, settings.tool_parser, settings.reasoning_parser)


@lru_cache(maxsize=4)
def find_answer_format(
    text: TargetText, tool_parser: str | None, reasoning_parser: str | None
) -> AnswerFormat:
    """None: the format that the chat template shows."""
    template = text.tokenizer.chat_template
    tokenizer = text.tokenizer.tokenizer
    tools = find_tool_format(tool_parser) if tool_parser else detect_tool_format(template)
    tools = tools or TOOL_FORMATS[DEFAULT_TOOL_FORMAT]
    reasoning = detect_reasoning(template)
    if reasoning_parser not in (None, NO_REASONING):
        reasoning = find_reasoning_format(reasoning_parser)
    if tools.name == HARMONY or reasoning_parser == NO_REASONING:
        reasoning = None
    start_ids: tuple[int, ...] = ()
    forced_end: tuple[int, ...] = ()
    if tools.name == HARMONY:
        forced_end = tuple(tokenizer.encode(HARMONY_FORCED_END, add_special_tokens=False))
    if reasoning is not None:
        start_ids = tuple(tokenizer.encode(reasoning.start, add_special_tokens=False))
        forced = f"\n{reasoning.end}\n\n"
        forced_end = tuple(tokenizer.encode(forced, add_special_tokens=False))
    return AnswerFormat(
        tools,
        reasoning,
        mentions_tools(template),
        tokenizer.get_added_vocab(),
        frozenset(tokenizer.all_special_tokens),
        start_ids,
        forced_end,
    )


def mentions_tools(template: str) -> bool:
    """Whether the code of a chat template, not its text or a comment, uses `tools`."""
    try:
        tokens = list(Environment().lex(template))
    except TemplateSyntaxError:
        return "tools" in template
    return any(kind == "name" and value == "tools" for _, kind, value in tokens)

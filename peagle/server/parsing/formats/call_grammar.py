"""Grammars that bind tool calls, in llguidance's Lark notation with inline JSON schemas.

A marker that the tokenizer has as an added token must be that token (`<[id]>`): llguidance spells
no other text with it, whether it is special or not. Other markers are text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.grammar import Grammar
from peagle.grammar.grammar import check_multiple, multiples
from peagle.server.parsing.tool import Tool, ToolChoice

# Arguments stand on one line, as chat templates write them. More whitespace would let small targets
# write nothing else.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
ANY_TEXT = "(?s:.*)"
NEWLINES = r'"\n\n"?'  # Targets that reason write them before a call.
MAX_FORCED_CALLS = 16  # Small targets that must call would not stop.


@dataclass(frozen=True, slots=True)
class BoundTool:
    name: str
    schema: dict[str, Any]  # What the arguments must follow.
    lenient: bool = False  # Keywords that llguidance does not know are ignored.


def bind_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[BoundTool]:
    """The tools that calls are bound to; none: nothing binds the answer.

    In "auto", a strict tool binds the calls of all tools: those that are not strict take any
    object. Where a call is forced, all schemas hold, but only strict tools promise that to the
    last keyword: agents write keywords that llguidance does not know, such as `propertyNames`.
    """
    if choice.kind == "none" or not tools:
        return []
    if choice.kind == "auto" and not any(tool.strict for tool in tools):
        return []
    bound = []
    for tool in choice.select(tools):
        schema = tool.arguments_schema()
        holds = tool.strict or choice.kind != "auto"
        bound.append(BoundTool(tool.name, schema if holds else {"type": "object"}, not tool.strict))
    return bound


def quoted(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text within a regular expression of Lark."""
    return "".join(
        char if char.isalnum() or char in "_<> " else f"\\x{ord(char):02x}" for char in text
    )


def json_value(schema: dict[str, Any], lenient: bool = False) -> str:
    """A value that follows a schema."""
    schema = schema | {"x-guidance": ONE_LINE | {"lenient": lenient}}
    text = json.dumps(schema, ensure_ascii=False)
    if "multipleOf" in text:
        for value in multiples(text):
            check_multiple(value)
    return f"%json {text}"


def text_without(marker: str) -> str:
    """A terminal of text that does not contain the marker, and is not empty."""
    return f"/(?s:.+)/ & ~/{ANY_TEXT}{escaped(marker)}{ANY_TEXT}/"


@dataclass(frozen=True, slots=True)
class DelimitedCalls:
    """Calls between a start marker and an end marker, or the next start marker.

    `bodies` are what may stand behind the start marker.
    """

    start: str
    bodies: Sequence[str]
    separator: str = ""  # Between forced calls.
    rules: Sequence[str] = ()  # Further ones that the bodies use.

    def grammar(self, choice: ToolChoice, added_tokens: Mapping[str, int]) -> Grammar:
        rules = [*self.rules, f"body: {' | '.join(f'body_{i}' for i in range(len(self.bodies)))}"]
        rules += [f"body_{i}: {body}" for i, body in enumerate(self.bodies)]
        if choice.kind != "auto":
            rules += self._forced(choice, added_tokens)
        else:
            rules += self._optional(choice, added_tokens)
        return Grammar("lark", "\n".join(rules))

    def _forced(self, choice: ToolChoice, added_tokens: Mapping[str, int]) -> list[str]:
        start = marker(self.start, added_tokens)
        separator = quoted(self.separator) if self.separator else ""
        more = repeated(f"{separator} {start} body", choice)
        return [f"start: {NEWLINES} {start} body {more}"]

    def _optional(self, choice: ToolChoice, added_tokens: Mapping[str, int]) -> list[str]:
        """Text, calls and text; the start marker in a text begins a call."""
        rules = [f"TEXT: {text_without(self.start)}"]
        if self.start in added_tokens:
            call = f"{marker(self.start, added_tokens)} body"
            calls = f"({call} TEXT?)*" if choice.parallel else f"({call})?"
            return [*rules, f"start: TEXT? {calls}"]
        # Text and marker are one terminal, because the lexer does not go back to where a marker
        # began.
        calls = "(head body)+ TEXT?" if choice.parallel else "head body"
        rules += [f"head[lazy]: /{ANY_TEXT}{escaped(self.start)}/"]
        return [*rules, f"start: TEXT? | {calls}"]


def repeated(call: str, choice: ToolChoice) -> str:
    """What may follow the first forced call; a named function is called once."""
    several = choice.parallel and choice.kind == "required"
    return f"({call}){{0,{MAX_FORCED_CALLS - 1}}}" if several else ""


def marker(text: str, added_tokens: Mapping[str, int]) -> str:
    return f"<[{added_tokens[text]}]>" if text in added_tokens else quoted(text)

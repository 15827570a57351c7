"""Hermes: the calls of Hermes, Qwen2.5, Qwen3 and many others, as JSON between tags.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

One newline directly before a start tag is not content, because chat templates write it themselves.
An end tag may be missing or cut off at the end of the answer: the call is complete without it.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from peagle.grammar import Grammar
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.formats.call_grammar import (
    BoundTool,
    DelimitedCalls,
    bind_tools,
    json_value,
    marker,
    quoted,
)
from peagle.server.parsing.formats.call_id import new_call_id
from peagle.server.parsing.formats.call_object import CallObject
from peagle.server.parsing.formats.tool_parser import ToolParser
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_format import NO_ADDED_TOKENS

START = "<tool_call>"
END = "</tool_call>"
TAIL = quoted("}\n")


class HermesParser(ToolParser):
    def _parse(self) -> Generator[None, None, None]:
        while start := (yield from self._read_content(("\n" + START, START))):
            yield from self._parse_call(start)

    def _parse_call(self, start: str) -> Generator[None, None, None]:
        before = yield from self._read_chars()
        call = CallObject()
        given = yield from self._read_object(call)
        after = end = ""
        if call.done:
            after = yield from self._read_chars()
            end = yield from self._read_one_of((END,))
            if not end:
                self._drop_beginning_of((END,))
        valid = call.call() if end or not self._pending else None
        if valid is not None and not given:
            self._give_call(valid)
        elif not given:
            self._give_content(start + before + call.text + after + end)


@dataclass(frozen=True, slots=True)
class HermesFormat:
    new_id: Callable[[], str] = new_call_id
    name = "hermes"
    markers = (START, END)
    shows_special_tokens = False

    def parser(self, tools: Sequence[Tool], streams_arguments: bool) -> AnswerParser:
        return HermesParser(self.new_id, streams_arguments)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        added_tokens: Mapping[str, int] = NO_ADDED_TOKENS,
    ) -> Grammar | None:
        bodies = [body(tool, added_tokens) for tool in bind_tools(tools, choice)]
        if not bodies:
            return None
        return DelimitedCalls(START, bodies, separator="\n").grammar(choice, added_tokens)


def body(tool: BoundTool, added_tokens: Mapping[str, int]) -> str:
    """What stands behind the start tag of a call, in Lark's notation."""
    head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return f"{quoted(head)} {json_value(tool.schema)} {TAIL} {marker(END, added_tokens)}"

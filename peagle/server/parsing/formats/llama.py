"""Llama 3.x: an answer is either text or calls in JSON.

    {"name": "add", "parameters": {"a": 1, "b": 2}}

`<|python_tag|>` may come first. Several calls are joined by semicolons, or in a list. Whatever
follows the calls is content.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from peagle.grammar import Grammar
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.formats.call_grammar import (
    NEWLINES,
    BoundTool,
    bind_tools,
    json_value,
    quoted,
    repeated,
)
from peagle.server.parsing.formats.call_id import new_call_id
from peagle.server.parsing.formats.call_object import CallObject
from peagle.server.parsing.formats.tool_parser import ToolParser
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_format import NO_ADDED_TOKENS

PYTHON_TAG = "<|python_tag|>"
# The text of an answer that is no call: it does not begin like one.
TEXT = r"/[ \t\n\r]*[^ \t\n\r\[{](?s:.*)/ & ~/[ \t\n\r]*<\|python_tag\|>(?s:.*)/"


class LlamaParser(ToolParser):
    def _parse(self) -> Generator[None, None, None]:
        before = yield from self._read_chars()
        before += yield from self._read_one_of((PYTHON_TAG,))
        before += yield from self._read_chars()
        before += yield from self._read_one_of(("[",))
        ends = (";", ",", "]") if before.endswith("[") else (";",)
        while True:
            before += yield from self._read_chars()
            call = CallObject(("parameters", "arguments"), needs_arguments=True)
            if not (yield from self._read_call(call, before)):
                break
            before = yield from self._read_chars()
            end = yield from self._read_one_of(ends)
            if end == "]" or (not self._pending and self._ended):
                break
            before += end
        yield from self._read_content(())


@dataclass(frozen=True, slots=True)
class LlamaFormat:
    new_id: Callable[[], str] = new_call_id
    name = "llama"
    markers = (PYTHON_TAG,)
    shows_special_tokens = False  # Calls look the same without the tag.

    def parser(self, tools: Sequence[Tool], streams_arguments: bool) -> AnswerParser:
        return LlamaParser(self.new_id, streams_arguments)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        added_tokens: Mapping[str, int] = NO_ADDED_TOKENS,
    ) -> Grammar | None:
        bound = bind_tools(tools, choice)
        if not bound:
            return None
        calls = " | ".join(f"call_{i}" for i in range(len(bound)))
        rules = [f"call: {calls}", *(f"call_{i}: {body(tool)}" for i, tool in enumerate(bound))]
        if choice.kind == "auto":
            more = '("; " call)*' if choice.parallel else ""
            rules += [f"start: TEXT? | {NEWLINES} call {more}", f"TEXT: {TEXT}"]
        else:
            more = repeated('"; " call', choice)
            rules += [f"start: {NEWLINES} call {more}"]
        return Grammar("lark", "\n".join(rules))


def body(tool: BoundTool) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
    return f'{quoted(head)} {json_value(tool.schema, tool.lenient)} "}}"'

"""Mistral: calls behind the special token `[TOOL_CALLS]`.

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]      tokenizers up to v7
    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}                              from v11 on

The older notation has one list of all calls, the newer one a marker for each call. Whitespace
before the marker is content, unless the answer has no other.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits

from peagle.grammar import Grammar
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.formats.call_grammar import (
    MAX_FORCED_CALLS,
    BoundTool,
    DelimitedCalls,
    bind_tools,
    json_value,
    marker,
    quoted,
)
from peagle.server.parsing.formats.call_id import new_mistral_id
from peagle.server.parsing.formats.call_object import ArgumentsObject, CallObject
from peagle.server.parsing.formats.tool_parser import ToolParser
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_format import NO_ADDED_TOKENS

START = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
ID_CHARS = ascii_letters + digits
NAME_CHARS = ID_CHARS + "_-.:"


class MistralParser(ToolParser):
    def _parse(self) -> Generator[None, None, None]:
        while start := (yield from self._read_content((START,))):
            before = start + (yield from self._read_chars())
            opened = yield from self._read_one_of(("[",))
            if opened:
                yield from self._parse_list(before + opened)
            else:
                yield from self._parse_named(before)

    def _parse_list(self, before: str) -> Generator[None, None, None]:
        """Read the calls of a list; from the first one that is invalid, the text is content."""
        while True:
            before += yield from self._read_chars()
            call = CallObject()
            if not (yield from self._read_call(call, before)):
                return
            before = yield from self._read_chars()
            end = yield from self._read_one_of((",", "]"))
            if end != ",":
                return
            before += end

    def _parse_named(self, before: str) -> Generator[None, None, None]:
        """Read a call whose name stands before its arguments."""
        name = yield from self._read_chars(NAME_CHARS)
        before += name
        follows = yield from self._read_one_of((ARGS, CALL_ID))
        before += follows
        if follows == CALL_ID:
            before += yield from self._read_chars(ID_CHARS)
            before += yield from self._read_one_of((ARGS,))
        before += yield from self._read_chars()
        if name:
            yield from self._read_call(ArgumentsObject(name), before)
        else:
            self._give_content(before)


@dataclass(frozen=True, slots=True)
class MistralFormat:
    new_id: Callable[[], str] = new_mistral_id
    name = "mistral"
    markers = (START, CALL_ID, ARGS)
    shows_special_tokens = True

    def parser(self, tools: Sequence[Tool], streams_arguments: bool) -> AnswerParser:
        return MistralParser(self.new_id, streams_arguments)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        added_tokens: Mapping[str, int] = NO_ADDED_TOKENS,
    ) -> Grammar | None:
        """A tokenizer with `[ARGS]` belongs to a target with the newer notation."""
        bound = bind_tools(tools, choice)
        if not bound:
            return None
        if ARGS in added_tokens:
            args = marker(ARGS, added_tokens)
            bodies = [f"{quoted(t.name)} {args} {json_value(t.schema, t.lenient)}" for t in bound]
            return DelimitedCalls(START, bodies).grammar(choice, added_tokens)
        # All calls stand behind one marker.
        single = ToolChoice(choice.kind, choice.name, parallel=False)
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(bound)))}"]
        rules += [f"call_{i}: {list_item(tool)}" for i, tool in enumerate(bound)]
        several = choice.parallel and choice.kind != "function"
        more = f'(", " call){{0,{MAX_FORCED_CALLS - 1}}}' if several else ""
        calls = DelimitedCalls(START, [f'" "? "[" call {more} "]"'], rules=rules)
        return calls.grammar(single, added_tokens)


def list_item(tool: BoundTool) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "arguments": '
    return f'{quoted(head)} {json_value(tool.schema, tool.lenient)} "}}"'

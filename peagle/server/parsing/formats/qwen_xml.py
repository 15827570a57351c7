"""Qwen3-Coder: calls in tags, with one tag for each parameter.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value begins and ends with a newline of its own, and ends at the first end tag (where a grammar
binds it: outside of JSON strings). The tool's schema says which JSON type it becomes. The tags
`<tool_call>` and `</tool_call>` may be missing. One newline directly before a start tag is not
content, because chat templates write it themselves.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits

from peagle.grammar import Grammar
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.formats.call_grammar import DelimitedCalls, bind_tools, marker
from peagle.server.parsing.formats.call_id import new_call_id
from peagle.server.parsing.formats.qwen_grammar import QwenRules
from peagle.server.parsing.formats.qwen_values import ValueSchemas, ends_in_string
from peagle.server.parsing.formats.tool_parser import ToolParser
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_format import NO_ADDED_TOKENS

START = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
VALUE_ENDS = ("\n</parameter>", "</parameter>")
STARTS = ("\n" + START, START, "\n" + FUNCTION, FUNCTION)
NAME_CHARS = ascii_letters + digits + "_-.:"
MAX_VALUE_ENDS = 8  # End tags within the strings of one JSON value, where a grammar binds it.


class QwenXmlParser(ToolParser):
    def __init__(
        self, tools: Sequence[Tool], new_id: Callable[[], str], streams_arguments: bool
    ) -> None:
        super().__init__(new_id, streams_arguments)
        self._schemas = {tool.name: ValueSchemas(tool.parameters) for tool in tools}
        self._verbatim: list[str] = []  # The text of the call so far.
        self._arguments: list[str] = []  # Its JSON, if it is not streamed.

    def _parse(self) -> Generator[None, None, None]:
        while start := (yield from self._read_content(STARTS)):
            self._verbatim, self._arguments = [start], []
            if not (yield from self._parse_call(start)):
                self._give_content("".join(self._verbatim))

    def _parse_call(self, start: str) -> Generator[None, None, bool]:
        """Read a call; False: there is none, or it is unfinished, and nothing was given."""
        if start.endswith(START):
            self._verbatim.append((yield from self._read_chars()))
            if not (yield from self._read_tag((FUNCTION,))):
                return False
        name = yield from self._read_chars(NAME_CHARS)
        self._verbatim.append(name)
        if not name or not (yield from self._read_tag((">",))):
            return False
        if self._streams_arguments:
            self._start_call(name)
        complete = yield from self._parse_parameters(self._schemas.get(name, ValueSchemas(None)))
        if complete:
            self._add_arguments("}")
            if not self._streams_arguments:
                self._start_call(name)
                self._give_arguments("".join(self._arguments))
            yield from self._read_chars()
            yield from self._read_end_tag(END)
        elif self._streams_arguments:
            self._drop_beginning_of((PARAMETER, FUNCTION_END))
        return complete or self._streams_arguments

    def _parse_parameters(self, schemas: ValueSchemas) -> Generator[None, None, bool]:
        """Read parameters and the function's end tag; False: it is missing."""
        separator = "{"
        while True:
            self._verbatim.append((yield from self._read_chars()))
            tag = yield from self._read_tag((PARAMETER, FUNCTION_END))
            if tag != PARAMETER:
                if tag and separator == "{":
                    self._add_arguments("{")
                return bool(tag)
            key: list[str] = []
            end = yield from self._read_until((">", "<", "\n"), key.append)
            self._verbatim += [*key, end]
            if end != ">":
                return False
            name = "".join(key)
            self._add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._parse_value(schemas, name)):
                return False

    def _parse_value(self, schemas: ValueSchemas, key: str) -> Generator[None, None, bool]:
        self._verbatim.append((yield from self._read_one_of(("\n",))))
        if schemas.is_string(key):
            return (yield from self._parse_string())
        value: list[str] = []
        for _ in range(MAX_VALUE_ENDS):
            end = yield from self._read_until(VALUE_ENDS, value.append)
            text = "".join(value)
            if not end or not self._streams_arguments or not ends_in_string(text + end):
                break
            value.append(end)
        self._verbatim += [text, end]
        if end:
            converted = schemas.convert(key, text)
            self._add_arguments(converted or json.dumps(text, ensure_ascii=False))
        return bool(end)

    def _parse_string(self) -> Generator[None, None, bool]:
        """Read a value that is a string, whatever it looks like."""
        self._add_arguments('"')
        end = yield from self._read_until(VALUE_ENDS, self._add_string)
        self._verbatim.append(end)
        if end:
            self._add_arguments('"')
        return bool(end)

    def _add_string(self, text: str) -> None:
        self._verbatim.append(text)
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _add_arguments(self, text: str) -> None:
        if self._streams_arguments:
            self._give_arguments(text)
        else:
            self._arguments.append(text)

    def _read_tag(self, tags: tuple[str, ...]) -> Generator[None, None, str]:
        tag = yield from self._read_one_of(tags)
        self._verbatim.append(tag)
        return tag


@dataclass(frozen=True, slots=True)
class QwenXmlFormat:
    new_id: Callable[[], str] = new_call_id
    name = "qwen-xml"
    markers = (START, END)
    shows_special_tokens = False

    def parser(self, tools: Sequence[Tool], streams_arguments: bool) -> AnswerParser:
        return QwenXmlParser(tools, self.new_id, streams_arguments)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        added_tokens: Mapping[str, int] = NO_ADDED_TOKENS,
    ) -> Grammar | None:
        bound = bind_tools(tools, choice)
        if not bound:
            return None
        end, rules = marker(END, added_tokens), QwenRules()
        bodies = [f"{rules.body(tool)} {end}" for tool in bound]
        calls = DelimitedCalls(START, bodies, separator="\n", rules=rules.rules)
        return calls.grammar(choice, added_tokens)

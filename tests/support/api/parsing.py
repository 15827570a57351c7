"""Answers as parsers see them: tools, recorded texts of every format, and cutting them."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from typing import Any

from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.formats.harmony import HarmonyFormat
from peagle.server.parsing.formats.hermes import HermesFormat
from peagle.server.parsing.formats.llama import LlamaFormat
from peagle.server.parsing.formats.mistral import MistralFormat
from peagle.server.parsing.formats.qwen_xml import QwenXmlFormat
from peagle.server.parsing.parsed_message import ParsedMessage
from peagle.server.parsing.tool import Tool
from peagle.server.parsing.tool_format import ToolFormat

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "where": {"type": "object"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS = [
    Tool("weather", "The weather in a city.", WEATHER),
    Tool("stop", "Stop.", {"type": "object", "properties": {}}),
]


def formats() -> dict[str, ToolFormat]:
    """All formats, with ids that count up."""
    kinds = (HermesFormat, QwenXmlFormat, LlamaFormat, MistralFormat, HarmonyFormat)
    return {kind.name: kind(new_id=counting_ids()) for kind in kinds}


def counting_ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def parse(parser: AnswerParser, pieces: Iterable[str]) -> ParsedMessage:
    message = ParsedMessage()
    for piece in pieces:
        for part in parser.push(piece):
            message.add(part)
    for part in parser.finish():
        message.add(part)
    return message


def parse_format(
    name: str, pieces: Iterable[str], streams: bool = False, tools: Sequence[Tool] = TOOLS
) -> ParsedMessage:
    return parse(formats()[name].parser(tools, streams), pieces)


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def cut(text: str, positions: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these positions; some may be empty."""
    edges = [0, *sorted(min(position, len(text)) for position in positions), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


# Answers with every element of a format; the tests of the format contain the expected results.
RECORDED = {
    "hermes": (
        "Let me look.\n"
        "<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "S\\u00e3o \\"Paulo\\" </tool_call>",'
        ' "days": 3, "where": {"lat": -23.5e0, "lon": [null, true]}}}\n'
        "</tool_call>\n"
        '<tool_call>{"arguments": {}, "name": "stop"}</tool_call>\n'
        "Both are <b>on</b> their way.\n"
        '<tool_call>\n{"name": weather}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    ),
    "qwen-xml": (
        "Let me look.\n"
        "<tool_call>\n<function=weather>\n"
        '<parameter=city>\nSão "Paulo"\n\n< 5\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=where>\n{"lat": -23.5}\n</parameter>\n'
        "<parameter=note>\nNone\n</parameter>\n"
        "</function>\n</tool_call>\n"
        "<function=stop>\n</function>\n</tool_call>\n"
        "Both are <b>on</b> their way.\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo"
    ),
    "llama": (
        ' <|python_tag|>{"name": "weather", "parameters": {"city": "Rome; {", "days": 3}};'
        ' {"type": "function", "name": "stop", "arguments": {}}\n'
        "Both are on their way."
    ),
    "mistral": (
        "Let me look. "
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome]", "days": 3}},'
        ' {"id": "abcdefghi", "name": "stop", "arguments": {}}] and '
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]stop[CALL_ID]123456789[ARGS]{}"
        "[TOOL_CALLS]weather[ARGS]{Paris}"
    ),
    "harmony": (
        "<|channel|>analysis<|message|>The user wants < weather.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>In Rome.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>'
        "<|start|>assistant to=functions.stop<|channel|>commentary<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.stop<|message|>{stop}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>It is warm."
    ),
}

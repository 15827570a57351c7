"""Recorded answers of every format are parsed into their calls and content."""

import re

import pytest

from peagle.server.parsing.answer_part import ToolCallArguments, ToolCallStart
from peagle.server.parsing.tool_formats import TOOL_FORMATS
from tests.support.api.parsing import RECORDED, TOOLS, calls_of, formats, parse_format

NAMES = list(RECORDED)


def test_hermes() -> None:
    message = parse_format("hermes", [RECORDED["hermes"]])
    where = {"lat": -23.5, "lon": [None, True]}
    city = 'São "Paulo" </tool_call>'
    assert calls_of(message) == [
        ("weather", {"city": city, "days": 3, "where": where}),
        ("stop", {}),
    ]
    assert message.content == (
        "Let me look.\nBoth are <b>on</b> their way.\n"
        '<tool_call>\n{"name": weather}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    )


def test_arguments_are_kept_verbatim() -> None:
    arguments = '{ "city" :"S\\u00e3o",\n"days": 1.0e2 }'
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments} }}</tool_call>'
    for streams in (False, True):
        assert parse_format("hermes", [text], streams).tool_calls[0].arguments == arguments


def test_a_hermes_call_without_arguments_or_end_tag() -> None:
    message = parse_format("hermes", ['<tool_call>\n{"name": "stop"}\n'])
    assert calls_of(message) == [("stop", {})]
    assert message.content == ""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "stop", "arguments": {}}\n'),
        ("qwen-xml", "<tool_call>\n<function=stop>\n</function>\n"),
    ],
)
def test_the_end_tag_may_be_cut_off(name: str, call: str, streams: bool) -> None:
    for length in range(len("</tool_call>")):
        message = parse_format(name, [call + "</tool_call>"[:length]], streams)
        assert (calls_of(message), message.content) == ([("stop", {})], "")


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "stop", "arguments": []}',
        '{"name": "stop", "arguments": "{}"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "stop", "arguments": {}}}',
        '{"name": "stop", "arguments": {"a": NaN}}',
        '{"name": "stop", "arguments": {"a": 01}}',
        '{"name": "stop", "arguments": {"a": 1,}}',
        '{"name": "stop", "arguments": {"a": "\n"}}',
        '{"name": "stop", "arguments": {"a": ' + "1" * 5000 + "}}",
        '{"name": "stop", "arguments": {"a": ' + "[" * 500 + "]" * 500 + "}}",
        '[{"name": "stop", "arguments": {}}]',
        "stop()",
        "",
    ],
)
def test_an_invalid_hermes_call_is_content(body: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    message = parse_format("hermes", [text])
    assert message.tool_calls == []
    assert message.content == text


def test_a_valid_call_follows_an_invalid_one() -> None:
    bad, good = '<tool_call>{"name" ', '<tool_call>{"name": "stop"}</tool_call>'
    message = parse_format("hermes", [bad + good])
    assert calls_of(message) == [("stop", {})]
    assert message.content == bad


def test_whitespace_around_calls_is_not_content() -> None:
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert parse_format("hermes", [f"\n\n{call} \n{call}\n\n"]).content == ""
    assert parse_format("hermes", [f"a\n\n{call}\n\nb\n"]).content == "a\n\n\nb\n"
    assert parse_format("hermes", ["\n \n"]).content == "\n \n"


def test_unknown_functions_are_calls() -> None:
    message = parse_format("hermes", ['<tool_call>{"name": "cook"}</tool_call>'])
    assert calls_of(message) == [("cook", {})]


def test_qwen_xml() -> None:
    for streams in (False, True):
        message = parse_format("qwen-xml", [RECORDED["qwen-xml"]], streams)
        del message.tool_calls[2:]  # In a stream, the call that is cut off has already begun.
        assert calls_of(message) == [
            (
                "weather",
                {
                    "city": 'São "Paulo"\n\n< 5',
                    "days": 3,
                    "metric": True,
                    "where": {"lat": -23.5},
                    "note": None,
                },
            ),
            ("stop", {}),
        ]
    message = parse_format("qwen-xml", [RECORDED["qwen-xml"]])
    assert message.content == (
        "Let me look.\nBoth are <b>on</b> their way.\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo"
    )


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "null", "null"),
        ("city", "  12 ", "  12 "),
        ("city", "", ""),
        ("city", "\n", "\n"),
        ("days", " 12 ", 12),
        ("days", "12.0", 12.0),
        ("days", "1.5", "1.5"),
        ("days", "many", "many"),
        ("days", "NaN", "NaN"),
        ("metric", "FALSE", False),
        ("where", '{"a": [1]}', {"a": [1]}),
        ("where", "[1]", "[1]"),
        ("note", "null", None),
        ("note", "7", "7"),
        ("note", '"7"', "7"),
        ("note", "hm", "hm"),
        ("undeclared", "7", 7),
        ("undeclared", "hm", "hm"),
    ],
)
def test_values_of_qwen_xml_have_the_type_of_the_schema(key: str, text: str, value: object) -> None:
    call = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    for streams in (False, True):
        assert calls_of(parse_format("qwen-xml", [call], streams)) == [("weather", {key: value})]


def test_an_end_tag_in_a_json_string_of_qwen_xml() -> None:
    text = (
        "<tool_call>\n<function=weather>\n"
        '<parameter=where>\n{"a": "</parameter>", "b": 1}\n</parameter>\n</function>'
    )
    message = parse_format("qwen-xml", [text], streams=True)
    assert calls_of(message) == [("weather", {"where": {"a": "</parameter>", "b": 1}})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
        "<tool_call>\nstop\n</tool_call>",
        "<tool_call>\n<function=stop>\nno\n</function>",
        "<tool_call>\n<function=stop>\n<parameter=a\n>1</parameter></function>",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1",
    ],
)
def test_an_invalid_qwen_xml_call_is_content(text: str) -> None:
    message = parse_format("qwen-xml", [text])
    assert message.tool_calls == []
    assert message.content == text


def test_llama() -> None:
    for streams in (False, True):
        message = parse_format("llama", [RECORDED["llama"]], streams)
        assert calls_of(message) == [("weather", {"city": "Rome; {", "days": 3}), ("stop", {})]
        assert message.content == "\nBoth are on their way."


def test_llama_calls_in_a_list() -> None:
    text = '[{"name": "stop", "parameters": {}},\n{"name": "weather", "parameters": {"city": "A"}}]'
    message = parse_format("llama", [text])
    assert calls_of(message) == [("stop", {}), ("weather", {"city": "A"})]
    assert message.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "It is warm.",
        '{"name": "Bob"}',
        '{"name": "Bob", "parameters": 3}',
        '[{"name": "Bob"}]',
        "[1] says so.",
        '{"temperature": 3',
        '<|python_tag|>print("warm")',
        ' Sure: {"name": "stop", "parameters": {}}',
        "",
        " \n",
    ],
)
def test_other_answers_of_llama_are_content(text: str) -> None:
    message = parse_format("llama", [text])
    assert message.tool_calls == []
    assert message.content == text


def test_mistral() -> None:
    for streams in (False, True):
        message = parse_format("mistral", [RECORDED["mistral"]], streams)
        del message.tool_calls[4:]  # In a stream, the invalid call has already begun.
        assert calls_of(message) == [
            ("weather", {"city": "Rome]", "days": 3}),
            ("stop", {}),
            ("weather", {"city": "Paris"}),
            ("stop", {}),
        ]
    message = parse_format("mistral", [RECORDED["mistral"]])
    assert message.content == "Let me look.  and [TOOL_CALLS]weather[ARGS]{Paris}"


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS] hm?", "[TOOL_CALLS][{}]", "[TOOL_CAL"]
)
def test_an_invalid_mistral_call_is_content(text: str) -> None:
    message = parse_format("mistral", [text])
    assert message.tool_calls == []
    assert message.content == text


def test_harmony() -> None:
    message = parse_format("harmony", [RECORDED["harmony"]])
    assert message.reasoning == "The user wants < weather.\nIn Rome."
    assert calls_of(message) == [("weather", {"city": "Rome"}), ("stop", {})]
    invalid = "<|start|>assistant<|channel|>commentary to=functions.stop<|message|>{stop}<|call|>"
    assert message.content == f"Let me look.{invalid}\nIt is warm."


def test_harmony_without_the_hidden_stop_token() -> None:
    text = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    assert calls_of(parse_format("harmony", [text])) == [("stop", {})]
    assert parse_format("harmony", ["<|channel|>final<|message|>Hi"]).content == "Hi"


def test_harmony_reasoning_that_is_cut_off() -> None:
    message = parse_format("harmony", ["<|channel|>analysis<|message|>The user<|e"])
    assert message.reasoning == "The user<|e"


@pytest.mark.parametrize("text", ["plain", "<|channel|>final", "<|start|>assistant is<|end|>"])
def test_harmony_text_outside_messages_is_content(text: str) -> None:
    assert parse_format("harmony", [text]).content == text.removesuffix("<|end|>")


@pytest.mark.parametrize("tokens", range(6))
def test_a_harmony_header_cut_off_by_the_thinking_budget(tokens: int) -> None:
    """The thinking budget may end anywhere, even between two messages."""
    header = ["<|end|>", "<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>"]
    forced = "<|end|><|start|>assistant<|channel|>final<|message|>"
    text = "<|channel|>analysis<|message|>Hm." + "".join(header[:tokens]) + forced + "Rome."
    message = parse_format("harmony", [text])
    assert (message.reasoning, message.content) == ("Hm.", "Rome.")


@pytest.mark.parametrize("name", NAMES)
def test_streamed_arguments_arrive_before_the_call_ends(name: str) -> None:
    beginnings = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro',
        "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRo",
        "llama": '{"name": "weather", "parameters": {"city": "Ro',
        "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Ro',
        "harmony": '<|channel|>commentary to=functions.weather<|message|>{"city": "Ro',
    }
    parser = formats()[name].parser(TOOLS, True)
    assert parser.push(beginnings[name]) == [
        ToolCallStart(0, "id0", "weather"),
        ToolCallArguments(0, '{"city": "Ro'),
    ]
    held = formats()[name].parser(TOOLS, False)
    assert held.push(beginnings[name]) == []


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
def test_an_answer_that_is_cut_off_in_an_end_tag(name: str, streams: bool) -> None:
    """The call is complete, and the beginning of the tag is not content."""
    calls = {
        "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "qwen-xml": "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    }
    for end in range(1, len("</tool_call>")):
        message = parse_format(name, [calls[name][:-end]], streams)
        assert (calls_of(message), message.content) == ([("stop", {})], "")


def test_a_streamed_qwen_xml_call_that_is_cut_off_in_a_tag() -> None:
    for end in ("<param", "</", "</functio"):
        text = f"<tool_call>\n<function=weather>\n{end}"
        message = parse_format("qwen-xml", [text], streams=True)
        assert (message.tool_calls[0].name, message.content) == ("weather", "")


def test_ids_of_calls() -> None:
    for name, tool_format in TOOL_FORMATS.items():
        parser = tool_format.parser(TOOLS, False)
        parts = parser.push(RECORDED[name]) + parser.finish()
        ids = [part.id for part in parts if isinstance(part, ToolCallStart)]
        assert len(set(ids)) == len(ids) >= 2
        pattern = "[A-Za-z0-9]{9}" if name == "mistral" else "call_[0-9a-f]{24}"
        assert all(re.fullmatch(pattern, call_id) for call_id in ids)

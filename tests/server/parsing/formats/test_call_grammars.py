"""Answers that follow a grammar of tool calls parse into calls that follow the tools' schemas."""

import json
import random
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from peagle.errors import UserError
from peagle.grammar.matcher import build_matcher
from peagle.server.parsing.parsed_message import ParsedMessage
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_formats import TOOL_FORMATS
from tests.support.api.call_walks import HARMONY, MISTRAL, TAGS, WalkTokenizer, walk_tokenizer
from tests.support.api.parsing import RECORDED, formats, parse

BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 5},
        "code": {"type": "string", "pattern": "^[a-c]{2}/[0-9]$|^z"},
        "copies": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["new", "used"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["title", "copies", "kind"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 3}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("book", "", BOOK, strict=True), Tool("leave", "", NOTHING), Tool("say", "", None)]
SCHEMAS = {"book": BOOK, "leave": NOTHING, "say": {"type": "object"}}
# The formats, with the added tokens of the tokenizers that use them.
CASES = [
    ("hermes", ()),
    ("hermes", TAGS),
    ("qwen-xml", ()),
    ("qwen-xml", TAGS),
    ("llama", ()),
    ("mistral", ()),
    ("mistral", MISTRAL[:1]),
    ("mistral", MISTRAL),
    ("harmony", HARMONY),
]
# The beginning of an answer with a call.
BEGINNINGS = {
    "hermes": "Hi. <tool_call>\n",
    "qwen-xml": "Hi.\n<tool_call>",
    "llama": "{",
    "mistral": "Hi.[TOOL_CALLS]",
    "harmony": "<|channel|>commentary to=",
}
cases = pytest.mark.parametrize(("name", "added"), CASES)


def walk_messages(
    name: str,
    tokenizer: WalkTokenizer,
    tools: list[Tool],
    choice: ToolChoice,
    count: int,
    begin: str = "",
) -> list[ParsedMessage]:
    """Parse random answers; streamed arguments and single characters must give equal messages."""
    grammar = TOOL_FORMATS[name].grammar(tools, choice, tokenizer.added_tokens)
    assert grammar is not None
    dice = random.Random(f"{name} {choice}")
    messages: list[ParsedMessage] = []
    while len(messages) < count:
        text = tokenizer.walk(grammar, dice, begin)
        if text is None:
            continue
        message = parse(formats()[name].parser(tools, True), list(text))
        assert parse(formats()[name].parser(tools, False), [text]) == message, text
        messages.append(message)
    return messages


def check_calls(message: ParsedMessage, schemas: dict[str, Any]) -> None:
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@cases
def test_required_calls(name: str, added: tuple[str, ...]) -> None:
    messages = walk_messages(name, walk_tokenizer(added), TOOLS, ToolChoice("required"), 6)
    for message in messages:
        assert message.tool_calls
        check_calls(message, SCHEMAS)
        assert message.content == "" or name == "harmony"  # The answer may begin with a preamble.
    assert name == "harmony" or any(len(message.tool_calls) > 1 for message in messages)


@cases
def test_one_call_or_a_named_function(name: str, added: tuple[str, ...]) -> None:
    tokenizer = walk_tokenizer(added)
    single = ToolChoice("required", parallel=False)
    for choice in (single, ToolChoice("function", "book")):
        for message in walk_messages(name, tokenizer, TOOLS, choice, 4):
            assert len(message.tool_calls) == 1
            check_calls(message, SCHEMAS if choice is single else {"book": BOOK})


@cases
def test_auto_with_a_strict_tool(name: str, added: tuple[str, ...]) -> None:
    """Calls of the strict tool follow its schema; those of others are objects."""
    schemas = {"book": BOOK, "leave": {"type": "object"}, "say": {"type": "object"}}
    tokenizer, auto = walk_tokenizer(added), ToolChoice("auto")
    for message in walk_messages(name, tokenizer, TOOLS, auto, 5):
        check_calls(message, schemas)
    for message in walk_messages(name, tokenizer, TOOLS, auto, 5, BEGINNINGS[name]):
        assert message.tool_calls
        check_calls(message, schemas)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_cases_without_a_grammar(name: str) -> None:
    loose = [Tool("say", "", {"type": "object"})]
    tool_format = TOOL_FORMATS[name]
    assert tool_format.grammar(loose, ToolChoice("auto")) is None
    assert tool_format.grammar(TOOLS, ToolChoice("none")) is None
    assert tool_format.grammar([], ToolChoice("auto")) is None


CALL = '{{"name": "book", "arguments": {{"title": "a", "copies": {}, "kind": "new"}}}}'


@pytest.mark.parametrize("added", [(), TAGS])
def test_calls_that_the_hermes_grammar_accepts(added: tuple[str, ...]) -> None:
    tokenizer, hermes = walk_tokenizer(added), TOOL_FORMATS["hermes"]
    valid = f"<tool_call>\n{CALL.format(1)}\n</tool_call>"
    invalid = f"<tool_call>\n{CALL.format(100)}\n</tool_call>"
    spaces = f"<tool_call>\n{CALL.format('  1')}\n</tool_call>"
    compact = valid.replace(' "copies": 1', '"copies":1')
    auto = hermes.grammar(TOOLS, ToolChoice("auto"), tokenizer.added_tokens)
    required = hermes.grammar(TOOLS, ToolChoice("required"), tokenizer.added_tokens)
    assert auto is not None
    assert required is not None
    for text in (
        "",
        "Hi.",
        valid,
        compact,
        f"Hi.\n{valid}\n{valid}\nBye, <tool_",
        f"{valid} <tool_call",
    ):
        assert tokenizer.accepts(auto, text), text
    for text in (invalid, f"Hi. {invalid}", "<tool_call>", "<tool_call>Hi", spaces):
        assert not tokenizer.accepts(auto, text), text
    assert tokenizer.accepts(required, f"{valid}\n{valid}")
    for text in ("", "Hi.", f"Hi.\n{valid}", invalid, spaces):
        assert not tokenizer.accepts(required, text), text


def test_a_tag_in_single_characters_does_not_bypass_the_grammar() -> None:
    """If the tag is a token, its single characters are other tokens with the same text."""
    tokenizer = walk_tokenizer(TAGS)
    grammar = TOOL_FORMATS["hermes"].grammar(TOOLS, ToolChoice("auto"), tokenizer.added_tokens)
    assert grammar is not None
    matcher = build_matcher(tokenizer.matcher_tokenizer, grammar)
    ids = [tokenizer.texts.index(char) for char in "<tool_call>"]
    assert matcher.try_consume_tokens(ids) == len(ids) - 1


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_schemas_that_cannot_be_arguments_are_refused(name: str) -> None:
    tokenizer = walk_tokenizer(HARMONY)
    for parameters in ({"type": "array"}, {"type": ["string"]}, {"type": 3}, [1]):
        tools = [Tool("say", "", parameters)]  # type: ignore[arg-type]
        with pytest.raises(UserError, match="`parameters` of the tool 'say'"):
            TOOL_FORMATS[name].grammar(tools, ToolChoice("required"), tokenizer.added_tokens)
    endless = {"properties": {"a": {"type": "integer", "multipleOf": 10_000_019}}}
    with pytest.raises(UserError, match="multipleOf"):
        tools = [Tool("say", "", endless)]
        TOOL_FORMATS[name].grammar(tools, ToolChoice("required"), tokenizer.added_tokens)


HOSTILE: list[dict[str, Any]] = [
    {"properties": 3},
    {"properties": [1]},
    {"properties": {"": {}, "a\n": 1, "b": None, "c": []}},
    {"properties": {"a": {"type": [["string"]]}, "b": {"enum": 3}, "c": {"type": "string"}}},
    {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": [], "pattern": 3}}},
    {"properties": {"a": {"type": "string", "pattern": "(/[|"}, "b": {"const": {}}}},
    {"properties": {"a": {"type": "string", "enum": [1, None, "b", [2]]}}},
    {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/$defs/x"}}},
    {"properties": {"a": {"$ref": "http://example.org"}, "b": {"anyOf": [{"$ref": "#"}, 3]}}},
    {"required": 3},
    {"required": [3, [4], None, "a"]},
    {"$ref": "#"},
    {"$ref": 5},
    {"x-guidance": 3, "additionalProperties": 7},
    {"properties": {"\ud800": {"type": "string", "const": "\udc00"}}},
]


@cases
@pytest.mark.parametrize("parameters", HOSTILE)
def test_a_hostile_schema_is_refused_or_followed(
    name: str, added: tuple[str, ...], parameters: dict[str, Any]
) -> None:
    """The server answers a UserError with status 400, and any other exception with 500."""
    tokenizer = walk_tokenizer(added)
    tools = [Tool("say", "", parameters)]
    with suppress(UserError):
        grammar = TOOL_FORMATS[name].grammar(tools, ToolChoice("required"), tokenizer.added_tokens)
        assert grammar is not None
        build_matcher(tokenizer.matcher_tokenizer, grammar)
    parse(TOOL_FORMATS[name].parser(tools, False), [RECORDED[name].replace("weather", "say")])


def test_newlines_may_stand_before_a_forced_call() -> None:
    tokenizer = walk_tokenizer(())
    for name in ("hermes", "qwen-xml", "llama", "mistral"):
        grammar = TOOL_FORMATS[name].grammar(TOOLS, ToolChoice("function", "leave"))
        assert grammar is not None
        text = tokenizer.walk(grammar, random.Random(0), "\n\n")
        assert text is not None
        message = parse(formats()[name].parser(TOOLS, True), [text])
        assert message.content == ""
        assert len(message.tool_calls) == 1


def test_an_unknown_function_is_refused() -> None:
    with pytest.raises(UserError, match="'cook', which is not in `tools`: book, leave, say"):
        TOOL_FORMATS["hermes"].grammar(TOOLS, ToolChoice("function", "cook"))


def test_harmony_needs_its_tokens() -> None:
    with pytest.raises(UserError, match="needs a target with the token"):
        TOOL_FORMATS["harmony"].grammar(TOOLS, ToolChoice("required"))


def test_schemas_that_qwen_xml_cannot_express_are_refused() -> None:
    refused: list[dict[str, Any]] = [{"anyOf": [{"required": ["a"]}]}, {"properties": {"a>": {}}}]
    for parameters in refused:
        with pytest.raises(UserError, match="the tool parser qwen-xml does not support"):
            tools = [Tool("say", "", parameters)]
            TOOL_FORMATS["qwen-xml"].grammar(tools, ToolChoice("required"))


@cases
def test_many_tools(name: str, added: tuple[str, ...]) -> None:
    tools = [Tool(f"book_{i}", "", BOOK) for i in range(128)]
    messages = walk_messages(name, walk_tokenizer(added), tools, ToolChoice("required"), 1)
    for message in messages:
        check_calls(message, {tool.name: BOOK for tool in tools})

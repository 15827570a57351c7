"""Answers that follow a grammar of tool calls parse into calls that follow the tools' schemas."""

import json
import random
from typing import Any

import jsonschema
import pytest

from peagle.errors import UserError
from peagle.server.parsing.parsed_message import ParsedMessage
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_formats import TOOL_FORMATS
from tests.support.call_walks import HARMONY, MISTRAL, TAGS, WalkTokenizer, walk_tokenizer
from tests.support.parsing import formats, parse

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
# The formats with the added tokens of tokenizers that they meet.
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
cases = pytest.mark.parametrize(("name", "added"), CASES)


def walk_messages(
    name: str, tokenizer: WalkTokenizer, tools: list[Tool], choice: ToolChoice, count: int
) -> list[ParsedMessage]:
    """The messages of random answers, the same with streamed arguments and in single characters."""
    grammar = TOOL_FORMATS[name].grammar(tools, choice, tokenizer.added_tokens)
    assert grammar is not None
    dice = random.Random(f"{name} {choice}")
    messages = []
    while len(messages) < count:
        text = tokenizer.walk(grammar, dice)
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
def test_required(name: str, added: tuple[str, ...]) -> None:
    messages = walk_messages(name, walk_tokenizer(added), TOOLS, ToolChoice("required"), 6)
    for message in messages:
        assert message.tool_calls
        check_calls(message, SCHEMAS)
        assert message.content == "" or name == "harmony"  # It may begin with a preamble.
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
    for message in walk_messages(name, walk_tokenizer(added), TOOLS, ToolChoice("auto"), 10):
        check_calls(message, schemas)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_nothing_binds_the_answer(name: str) -> None:
    loose = [Tool("say", "", {"type": "object"})]
    tool_format = TOOL_FORMATS[name]
    assert tool_format.grammar(loose, ToolChoice("auto")) is None
    assert tool_format.grammar(TOOLS, ToolChoice("none")) is None
    assert tool_format.grammar([], ToolChoice("auto")) is None


CALL = '{{"name": "book", "arguments": {{"title": "a", "copies": {}, "kind": "new"}}}}'


@pytest.mark.parametrize("added", [(), TAGS])
def test_what_hermes_accepts(added: tuple[str, ...]) -> None:
    tokenizer, hermes = walk_tokenizer(added), TOOL_FORMATS["hermes"]
    valid = f"<tool_call>\n{CALL.format(1)}\n</tool_call>"
    invalid = f"<tool_call>\n{CALL.format(100)}\n</tool_call>"
    spaces = f"<tool_call>\n{CALL.format('  1')}\n</tool_call>"
    auto = hermes.grammar(TOOLS, ToolChoice("auto"), tokenizer.added_tokens)
    required = hermes.grammar(TOOLS, ToolChoice("required"), tokenizer.added_tokens)
    assert auto is not None
    assert required is not None
    for text in ("", "Hi.", valid, f"Hi.\n{valid}\n{valid}\nBye, <tool_", f"{valid} <tool_call"):
        assert tokenizer.accepts(auto, text), text
    for text in (invalid, f"Hi. {invalid}", "<tool_call>", "<tool_call>Hi", spaces):
        assert not tokenizer.accepts(auto, text), text
    assert tokenizer.accepts(required, f"{valid}\n{valid}")
    for text in ("", "Hi.", f"Hi.\n{valid}", invalid, spaces):
        assert not tokenizer.accepts(required, text), text


def test_a_tag_in_single_characters_does_not_get_around_the_grammar() -> None:
    """Where the tag is a token, its characters would not be that token, but the same text."""
    tokenizer = walk_tokenizer(TAGS)
    grammar = TOOL_FORMATS["hermes"].grammar(TOOLS, ToolChoice("auto"), tokenizer.added_tokens)
    assert grammar is not None
    from peagle.grammar.matcher import build_matcher

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


def test_an_unknown_function_is_refused() -> None:
    with pytest.raises(UserError, match="'cook', which is not in `tools`: book, leave, say"):
        TOOL_FORMATS["hermes"].grammar(TOOLS, ToolChoice("function", "cook"))


def test_harmony_needs_its_tokens() -> None:
    with pytest.raises(UserError, match="needs a target with the token"):
        TOOL_FORMATS["harmony"].grammar(TOOLS, ToolChoice("required"))


def test_what_qwen_xml_cannot_express_is_refused() -> None:
    for parameters in ({"anyOf": [{"required": ["a"]}]}, {"properties": {"a>": {}}}):
        with pytest.raises(UserError, match="the tool parser qwen-xml does not support"):
            tools = [Tool("say", "", parameters)]
            TOOL_FORMATS["qwen-xml"].grammar(tools, ToolChoice("required"))


@cases
def test_many_tools(name: str, added: tuple[str, ...]) -> None:
    tools = [Tool(f"book_{i}", "", BOOK) for i in range(128)]
    messages = walk_messages(name, walk_tokenizer(added), tools, ToolChoice("required"), 1)
    for message in messages:
        check_calls(message, {tool.name: BOOK for tool in tools})

"""Parsing does not depend on how an answer is cut into pieces, even if it is malformed."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.server.parsing.parsed_message import ParsedMessage
from peagle.server.parsing.reasoning import THINK_TAGS, ReasoningParser
from tests.support.api.parsing import RECORDED, TOOLS, cut, formats, parse, parse_format

NAMES = list(RECORDED)
THOUGHTS = "<think>\n\nHm,\n <b> so\n\n</think>\n\n"
# Fragments of malformed answers, for each format.
FRAGMENTS = {
    "hermes": ("<tool_call>", "</tool_call>", '{"name": "stop", "arguments": {}}', '{"name": "'),
    "qwen-xml": (
        *("<tool_call>", "</tool_call>", "<function=stop>", "</function>", "<function="),
        *("<parameter=city>", "<parameter=where>", "</parameter>", '{"a": 1}'),
    ),
    "llama": ("<|python_tag|>", '{"name": "stop", "parameters": {}}', '{"name": "', "[", "]", ";"),
    "mistral": (
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "stop", "[", "]", ",", "{}"),
        '{"name": "stop", "arguments": {}}',
    ),
    "harmony": (
        *("<|start|>", "<|end|>", "<|call|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        *("analysis", "final", "commentary to=functions.stop ", "{}", "assistant"),
    ),
}
COMMON = ("\n", " ", "{", "}", '"', "a", "<", "\\", "\0", "é", "<think>", "</think>", "\ud7ff")


def outcome(
    name: str, pieces: list[str], streams: bool, reasoning: bool, inside: bool = False
) -> ParsedMessage:
    parser = formats()[name].parser(TOOLS, streams)
    if reasoning:
        parser = ReasoningParser(THINK_TAGS, parser, starts_inside=inside)
    return parse(parser, pieces)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_cut_and_single_characters(name: str, streams: bool) -> None:
    text = RECORDED[name]
    whole = parse_format(name, [text], streams)
    assert parse_format(name, list(text), streams) == whole
    for position in range(len(text)):
        assert parse_format(name, cut(text, [position]), streams) == whole


@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 800)), st.booleans(), st.booleans())
def test_random_cuts_of_recorded_answers(
    name: str, positions: list[int], streams: bool, reasoning: bool
) -> None:
    text = THOUGHTS + RECORDED[name] if reasoning else RECORDED[name]
    whole = outcome(name, [text], streams, reasoning)
    assert outcome(name, cut(text, positions), streams, reasoning) == whole


@st.composite
def malformed(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(NAMES))
    fragments = st.sampled_from([*FRAGMENTS[name], *COMMON])
    return name, "".join(draw(st.lists(fragments, max_size=24)))


@settings(max_examples=300)
@given(malformed(), st.lists(st.integers(0, 200)), st.booleans(), st.booleans(), st.booleans())
def test_malformed_answers(
    answer: tuple[str, str], positions: list[int], streams: bool, reasoning: bool, inside: bool
) -> None:
    name, text = answer
    whole = outcome(name, [text], streams, reasoning, inside)
    assert outcome(name, cut(text, positions), streams, reasoning, inside) == whole
    assert outcome(name, list(text), streams, reasoning, inside) == whole


@settings(max_examples=200)
@given(malformed())
def test_no_text_of_a_malformed_answer_is_lost_or_invented(answer: tuple[str, str]) -> None:
    """An answer without calls and reasoning is content; with calls, no content is invented."""
    name, text = answer
    message = parse_format(name, [text])
    if name == "harmony":
        return  # headers of messages are not content
    if not message.tool_calls:
        assert message.content == text
    rest = iter(text)
    assert all(char in rest for char in message.content)


def test_random_damage_of_recorded_answers() -> None:
    dice = random.Random(0)
    for _ in range(100):
        name = dice.choice(NAMES)
        text = list(RECORDED[name])
        for _ in range(dice.randint(1, 4)):
            start = dice.randrange(len(text))
            text[start : start + dice.randint(0, 9)] = dice.choice(["", '"', "}", "\0", "<", "\\"])
        damaged = "".join(text)
        for streams in (False, True):
            whole = parse_format(name, [damaged], streams)
            assert parse_format(name, list(damaged), streams) == whole


@pytest.mark.parametrize(
    ("name", "start", "repeated"),
    [
        ("hermes", "", "<"),
        ("hermes", "", "<tool_call>"),
        ("hermes", '<tool_call>{"a": "', "\0x"),
        ("hermes", '<tool_call>{"a": "', "x"),
        ("hermes", "<tool_call>{", '"arguments": {}, '),
        ("hermes", '<tool_call>{"a": ', "["),
        ("qwen-xml", "<tool_call><function=weather><parameter=city>", "x\n"),
        ("qwen-xml", "<tool_call><function=weather>", "<parameter=where>{</parameter>"),
        ("llama", "", " "),
        ("llama", "[", '{"name": "a", "parameters": {}},'),
        ("mistral", "[TOOL_CALLS]", "a"),
        ("mistral", "", "[TOOL_CALLS]["),
        ("harmony", "<|channel|>", "final"),
        ("harmony", "", "<|channel|>analysis<|message|>"),
        ("harmony", "", "\n"),
    ],
)
def test_the_cost_is_linear(name: str, start: str, repeated: str) -> None:
    """Eight times the text takes at most sixteen times as long, in one of three attempts."""

    def seconds(size: int) -> float:
        text = start + repeated * (size // len(repeated))
        began = time.process_time()
        outcome(name, list(text), streams=False, reasoning=False)
        outcome(name, [text], streams=True, reasoning=True, inside=True)
        return time.process_time() - began

    short = min(seconds(1 << 11) for _ in range(2))
    assert any(seconds(1 << 14) < 16 * short + 0.05 for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("start", ["", "<", '<tool_call>{"name": "stop", "arguments": {"a": "'])
def test_a_million_single_characters_take_seconds(start: str, streams: bool) -> None:
    parser = ReasoningParser(THINK_TAGS, formats()["hermes"].parser(TOOLS, streams))
    began = time.process_time()
    for char in start + "x" * 1_000_000:
        parser.push(char)
    parser.finish()
    assert time.process_time() - began < 30

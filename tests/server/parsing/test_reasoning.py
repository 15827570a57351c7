"""Reasoning in tags is separated from the answer; newlines next to the tags are removed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.server.parsing.answer_parser import PlainParser
from peagle.server.parsing.parsed_message import ParsedMessage
from peagle.server.parsing.reasoning import THINK_TAGS, ReasoningParser, detect_reasoning
from tests.support.api.parsing import cut, parse

PIECES = ("<think>", "</think>", "\n", " ", "a", "<", "</", "think>", "\0")


def read(pieces: list[str], inside: bool = False) -> tuple[str, str]:
    message: ParsedMessage = parse(ReasoningParser(THINK_TAGS, PlainParser(), inside), pieces)
    return message.reasoning, message.content


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
        ("\n <think>Hm.\n\nSo.</think>Yes.", False, "Hm.\n\nSo.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("\n\n Hm.</think>Yes.", True, " Hm.", "Yes."),
        ("<think>\nHm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>Hm.\n", False, "Hm.", ""),
        ("Hm.</thi", True, "Hm.</thi", ""),
        ("Yes.", False, "", "Yes."),
        ("\n Yes.</think>", False, "", "\n Yes.</think>"),
        ("<thin", False, "", "<thin"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("", True, "", ""),
        ("\n", False, "", "\n"),
    ],
)
def test_reasoning_and_answer(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert read([text], inside) == (reasoning, content)
    assert read(list(text), inside) == (reasoning, content)


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
    st.lists(st.integers(0, 60)),
    st.booleans(),
)
def test_reasoning_with_random_cuts(text: str, positions: list[int], inside: bool) -> None:
    assert read(cut(text, positions), inside) == read([text], inside)


def test_reasoning_is_streamed() -> None:
    parser = ReasoningParser(THINK_TAGS, PlainParser())
    assert parser.push("<think>\nHm") != []


def test_the_tags_of_a_template_are_detected() -> None:
    assert detect_reasoning("{{ '<think>\n\n</think>\n\n' }}") is THINK_TAGS
    assert detect_reasoning("{{ messages }}") is None

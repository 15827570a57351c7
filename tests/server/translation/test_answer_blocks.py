"""Blocks of an answer: order, white space, and their use in the next request."""

from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.server.parsing.answer_part import (
    AnswerPart,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from peagle.server.translation.answer_blocks import (
    AnswerBlocks,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockStart,
)
from peagle.server.translation.conversation import Conversation


def run(parts: list[AnswerPart]) -> tuple[AnswerBlocks, list[BlockEvent]]:
    blocks = AnswerBlocks()
    events = [event for part in parts for event in blocks.push(part)]
    return blocks, events + blocks.finish()


def kinds_and_texts(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    return [(block.kind, block.text) for block in run(parts)[0].blocks]


CALLS: list[AnswerPart] = [
    ToolCallStart(0, "a", "f"),
    ToolCallArguments(0, "{"),
    ToolCallArguments(0, "}"),
    Content("\n"),
    ToolCallStart(1, "b", "g"),
    ToolCallArguments(1, "{}"),
]


def test_white_space_between_blocks_is_removed() -> None:
    assert kinds_and_texts([Reasoning("hm"), Content("\n"), Content("\nyes"), Content("\n")]) == [
        ("reasoning", "hm"),
        ("text", "\n\nyes\n"),
    ]
    assert kinds_and_texts([Reasoning("\n\n"), Content("yes")]) == [("text", "yes")]
    assert kinds_and_texts([Content("\n"), *CALLS, Content(" ")]) == [
        ("tool_call", "{}"),
        ("tool_call", "{}"),
    ]
    assert kinds_and_texts([]) == [("text", "")]
    assert kinds_and_texts([Content(" "), Content("\n")]) == [("text", " \n")]
    assert kinds_and_texts([Reasoning(" ")]) == [("text", "")]


@settings(max_examples=200)
@given(st.lists(st.sampled_from([Content(" "), Content("x"), Reasoning("\n"), Reasoning("y")])))
def test_blocks_do_not_overlap(parts: list[AnswerPart]) -> None:
    blocks, events = run([*parts, *CALLS])
    seen: dict[int, str] = {}
    is_open = False
    for event in events:
        index = event.block.index
        if isinstance(event, BlockStart):
            assert not is_open and index == len(seen)
            seen[index] = ""
            is_open = True
        elif isinstance(event, BlockDelta):
            assert is_open and index == len(seen) - 1 and event.text
            seen[index] += event.text
        else:
            assert isinstance(event, BlockEnd) and is_open
            is_open = False
    assert not is_open
    assert list(seen.values()) == [block.text for block in blocks.blocks]
    assert not any(block.text.isspace() for block in blocks.blocks)


def test_blocks_of_an_answer_become_one_message() -> None:
    conversation = Conversation([])
    conversation.add_text("developer", "Be brief.")
    conversation.add_text("system", "Be kind.")
    conversation.add_text("user", "Hi")
    # Reasoning encrypted by another server has no text and is left out.
    conversation.add_reasoning("")
    for block in run([Reasoning("hm"), Content("yes"), *CALLS])[0].blocks:
        conversation.add_block(block)
    conversation.add_tool_result("a", "1")
    conversation.add_tool_result("b", "2")
    assert conversation.to_body() == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
    ]

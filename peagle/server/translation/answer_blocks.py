"""AnswerBlocks: the parts of an answer, grouped into blocks that begin, grow and end.

The Responses API and Anthropic's Messages API both write answers as such blocks, under other names.
White space of its own before, between and after other blocks is not a block.
"""

from dataclasses import dataclass
from typing import Literal

from peagle.server.parsing.answer_part import AnswerPart, Content, Reasoning, ToolCallStart

BlockKind = Literal["text", "reasoning", "tool_call"]


@dataclass(slots=True)
class AnswerBlock:
    index: int
    kind: BlockKind
    text: str = ""  # Of a tool call: the JSON text of its arguments.
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlockStart:
    block: AnswerBlock


@dataclass(frozen=True, slots=True)
class BlockDelta:
    block: AnswerBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    block: AnswerBlock


BlockEvent = BlockStart | BlockDelta | BlockEnd


class AnswerBlocks:
    """At most one block is open: the last one."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.is_open = False
        self._blank = ""  # White space that may begin a block of text or reasoning.
        self._blank_kind: BlockKind = "text"

    def push(self, part: AnswerPart) -> list[BlockEvent]:
        if isinstance(part, Content):
            return self._push_text("text", part.text)
        if isinstance(part, Reasoning):
            return self._push_text("reasoning", part.text)
        if isinstance(part, ToolCallStart):
            return self._open(AnswerBlock(len(self.blocks), "tool_call", "", part.id, part.name))
        return self._grow(part.text)

    def finish(self) -> list[BlockEvent]:
        """End the open block. An answer without blocks gets an empty text."""
        events: list[BlockEvent] = []
        if not self.blocks:
            text = self._blank if self._blank_kind == "text" else ""
            events += self._open(AnswerBlock(0, "text"))
            events += self._grow(text)
        return events + self._close()

    def _push_text(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        if self.is_open and self.blocks[-1].kind == kind:
            return self._grow(text)
        if self._blank_kind == kind:
            text = self._blank + text
        if not text.strip():
            self._blank = text
            self._blank_kind = kind
            return []
        events = self._open(AnswerBlock(len(self.blocks), kind))
        return events + self._grow(text)

    def _open(self, block: AnswerBlock) -> list[BlockEvent]:
        events = self._close()
        self._blank = ""
        self.blocks.append(block)
        self.is_open = True
        return [*events, BlockStart(block)]

    def _grow(self, text: str) -> list[BlockEvent]:
        if not text:
            return []
        block = self.blocks[-1]
        block.text += text
        return [BlockDelta(block, text)]

    def _close(self) -> list[BlockEvent]:
        if not self.is_open:
            return []
        self.is_open = False
        return [BlockEnd(self.blocks[-1])]

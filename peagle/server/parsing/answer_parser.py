"""AnswerParser: turns the text of one answer, in pieces of any size, into parts.

The parts do not depend on how the text was cut into pieces, once neighboring parts of a kind are
joined: a step of several tokens may end anywhere in a marker.
"""

from typing import Protocol

from peagle.server.parsing.answer_part import AnswerPart, Content


class AnswerParser(Protocol):
    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this text completes. The beginning of a marker is held back."""

    def finish(self) -> list[AnswerPart]:
        """The parts of the text that was held back; no more text follows."""


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []

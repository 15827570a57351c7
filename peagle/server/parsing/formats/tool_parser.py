"""ToolParser: the base of the parsers of tool formats.

Whitespace at the beginning of the answer, between calls and behind them is not content, unless
other text stands there too.
"""

from collections.abc import Callable, Generator

from peagle.server.parsing.answer_part import (
    AnswerPart,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from peagle.server.parsing.answer_reader import AnswerReader
from peagle.server.parsing.formats.call_object import ArgumentsObject, Call, CallObject

TextKind = type[Content] | type[Reasoning] | type[ToolCallArguments]


class ToolParser(AnswerReader):
    def __init__(self, new_id: Callable[[], str], streams_arguments: bool) -> None:
        super().__init__()
        self._new_id = new_id
        self._streams_arguments = streams_arguments
        self._texts: list[str] = []  # Text of one kind that is no part yet.
        self._kind: TextKind = Content
        self._blank: list[str] = []  # Whitespace since the last call, if nothing else came.
        self._is_blank = True
        self._calls = 0

    def finish(self) -> list[AnswerPart]:
        parts = super().finish()
        if self._blank and not self._calls:
            parts.append(Content("".join(self._blank)))
        return parts

    def _take_parts(self) -> list[AnswerPart]:
        self._flush()
        return super()._take_parts()

    def _read_content(self, markers: tuple[str, ...]) -> Generator[None, None, str]:
        """Give content up to the next marker, which is read and returned; "": there is none."""
        return (yield from self._read_until(markers, self._give_content))

    def _read_object(self, call: CallObject | ArgumentsObject) -> Generator[None, None, bool]:
        """Read a call's JSON object; with streamed arguments, give its parts on the way.

        Returns whether parts of it have been given.
        """
        given = False
        while True:
            used = call.feed(self._pending)
            self._pending = self._pending[used:]
            if self._streams_arguments and call.has_arguments:
                name = call.name if not given else None
                if name is not None:
                    self._start_call(name)
                    given = True
                if given:
                    self._give_arguments(call.take_arguments())
            if call.done or call.failed or self._ended:
                return given
            yield

    def _read_call(
        self, call: CallObject | ArgumentsObject, before: str
    ) -> Generator[None, None, bool]:
        """Read a call and give it; what is none becomes content, with the text before it.

        Returns whether it was a call.
        """
        given = yield from self._read_object(call)
        valid = call.call()
        if valid is not None and not given:
            self._give_call(valid)
        elif not given:
            self._give_content(before + call.text)
        return valid is not None

    def _read_end_tag(self, tag: str) -> Generator[None, None, str]:
        """Read an end tag, or the beginning of it that the end of the answer has cut off."""
        end = yield from self._read_one_of((tag,))
        if not end and self._ended and tag.startswith(self._pending):
            end, self._pending = self._pending, ""
        return end

    def _give_content(self, text: str) -> None:
        if not text:
            return
        if self._is_blank and text.isspace():
            self._blank.append(text)
            return
        self._give(Content, "".join(self._blank) + text)
        self._blank = []
        self._is_blank = False

    def _give_reasoning(self, text: str) -> None:
        self._give(Reasoning, text)

    def _give_arguments(self, text: str) -> None:
        """Give arguments of the call that was started last."""
        self._give(ToolCallArguments, text)

    def _give_call(self, call: Call) -> None:
        self._start_call(call.name)
        self._give_arguments(call.arguments)

    def _start_call(self, name: str) -> None:
        self._flush()
        self._parts.append(ToolCallStart(self._calls, self._new_id(), name))
        self._calls += 1
        self._blank = []
        self._is_blank = True

    def _give(self, kind: TextKind, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._texts.append(text)

    def _flush(self) -> None:
        """Make one part of the text of a kind."""
        text = "".join(self._texts)
        self._texts = []
        if not text:
            return
        if self._kind is ToolCallArguments:
            self._parts.append(ToolCallArguments(self._calls - 1, text))
        else:
            self._parts.append(Content(text) if self._kind is Content else Reasoning(text))

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
from peagle.server.parsing.call_object import Call, CallObject


class ToolParser(AnswerReader):
    def __init__(self, new_id: Callable[[], str], streams_arguments: bool) -> None:
        super().__init__()
        self._new_id = new_id
        self._streams_arguments = streams_arguments
        self._content: list[str] = []  # Content that is no part yet.
        self._blank: list[str] = []  # Whitespace since the last call, if nothing else came.
        self._is_blank = True
        self._calls = 0

    def finish(self) -> list[AnswerPart]:
        parts = super().finish()
        if self._blank and not self._calls:
            parts.append(Content("".join(self._blank)))
        return parts

    def _take_parts(self) -> list[AnswerPart]:
        self._flush_content()
        return super()._take_parts()

    def _read_content(self, markers: tuple[str, ...]) -> Generator[None, None, str]:
        """Give content up to the next marker, which is read and returned; "": there is none."""
        return (yield from self._read_until(markers, self._give_content))

    def _read_object(self, call: CallObject) -> Generator[None, None, bool]:
        """Read a call's JSON object; with streamed arguments, give its parts on the way.

        Returns whether parts of it have been given.
        """
        given = False
        while True:
            used = call.feed(self._pending)
            self._pending = self._pending[used:]
            if self._streams_arguments and call.has_arguments:
                name = call.name() if not given else None
                if name is not None:
                    self._start_call(name)
                    given = True
                if given:
                    self._give_arguments(call.take_arguments())
            if call.done or call.failed or self._ended:
                return given
            yield

    def _give_content(self, text: str) -> None:
        if not text:
            return
        if self._is_blank and text.isspace():
            self._blank.append(text)
            return
        self._content += self._blank
        self._content.append(text)
        self._blank = []
        self._is_blank = False

    def _give_reasoning(self, text: str) -> None:
        if text:
            self._flush_content()
            self._parts.append(Reasoning(text))

    def _give_call(self, call: Call) -> None:
        self._start_call(call.name)
        self._give_arguments(call.arguments)

    def _start_call(self, name: str) -> None:
        self._flush_content()
        self._parts.append(ToolCallStart(self._calls, self._new_id(), name))
        self._calls += 1
        self._blank = []
        self._is_blank = True

    def _give_arguments(self, text: str) -> None:
        """Give arguments of the call that was started last."""
        if text:
            self._parts.append(ToolCallArguments(self._calls - 1, text))

    def _flush_content(self) -> None:
        if self._content:
            self._parts.append(Content("".join(self._content)))
            self._content = []

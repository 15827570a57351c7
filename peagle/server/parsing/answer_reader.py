"""AnswerReader: the base of the parsers, which read an answer as it arrives.

A parser is a generator that reads the answer from its beginning to its end and yields where it
needs more text. So its result cannot depend on where the text was cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

from peagle.server.parsing.answer_part import AnswerPart
from peagle.server.parsing.held_text import find_first, held_back

# Longer pieces are read in chunks: what is read is cut off the pending text, which copies the rest.
CHUNK_CHARS = 1 << 10
WHITESPACE = " \t\n\r"


class AnswerReader(ABC):
    def __init__(self) -> None:
        self._pending = ""  # Text that has not been read; short, for the same reason.
        self._ended = False
        self._parts: list[AnswerPart] = []
        self._steps = self._parse()

    def push(self, text: str) -> list[AnswerPart]:
        for start in range(0, len(text), CHUNK_CHARS):
            self._pending += text[start : start + CHUNK_CHARS]
            next(self._steps, None)
        return self._take_parts()

    def finish(self) -> list[AnswerPart]:
        self._ended = True
        next(self._steps, None)
        return self._take_parts()

    @abstractmethod
    def _parse(self) -> Generator[None, None, None]:
        """Read the whole answer."""

    def _take_parts(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts

    def _read_until(
        self, markers: tuple[str, ...], give: Callable[[str], None]
    ) -> Generator[None, None, str]:
        """Give the text up to the next marker, which is read and returned; "": there is none."""
        while True:
            position, marker = find_first(self._pending, markers)
            if marker:
                give(self._pending[:position])
                self._pending = self._pending[position + len(marker) :]
                return marker
            kept = 0 if self._ended else held_back(self._pending, markers)
            end = len(self._pending) - kept
            give(self._pending[:end])
            self._pending = self._pending[end:]
            if self._ended:
                return ""
            yield

    def _read_chars(self, chars: str = WHITESPACE) -> Generator[None, None, str]:
        """Read all of these characters that follow, by default whitespace, and return them."""
        read = []
        while True:
            rest = self._pending.lstrip(chars)
            read.append(self._pending[: len(self._pending) - len(rest)])
            self._pending = rest
            if rest or self._ended:
                return "".join(read)
            yield

    def _read_one_of(self, texts: tuple[str, ...]) -> Generator[None, None, str]:
        """The one of the texts that follows, which is read; "": none of them."""
        while True:
            for text in texts:
                if self._pending.startswith(text):
                    self._pending = self._pending[len(text) :]
                    return text
            if self._ended or not any(text.startswith(self._pending) for text in texts):
                return ""
            yield

    def _drop_beginning_of(self, texts: tuple[str, ...]) -> None:
        """Drop the rest of an answer that ends within one of the texts."""
        if self._ended and any(text.startswith(self._pending) for text in texts):
            self._pending = ""

"""JsonScanner: checks the text of a JSON object as it arrives, and finds its members and its end.

It is strict (RFC 8259) and linear: every character is looked at once, wherever the text is cut.
"""

import re
from dataclasses import dataclass

MAX_DEPTH = 128  # Deeper objects are refused, because json.loads of clients recurses.
WHITESPACE = " \n\r\t"
STRING_BODY = re.compile(r'[^"\\\x00-\x1f]*')
LITERALS = {"t": "true", "f": "false", "n": "null"}
# The states of a number by the character class that may follow: 0, 1-9, "-", "+", ".", "e".
NUMBER_STEPS = {
    "-": {"0": "zero", "9": "int"},
    "zero": {".": "dot", "e": "e"},
    "int": {"0": "int", "9": "int", ".": "dot", "e": "e"},
    "dot": {"0": "fraction", "9": "fraction"},
    "fraction": {"0": "fraction", "9": "fraction", "e": "e"},
    "e": {"0": "exponent", "9": "exponent", "-": "sign", "+": "sign"},
    "sign": {"0": "exponent", "9": "exponent"},
    "exponent": {"0": "exponent", "9": "exponent"},
}
COMPLETE_NUMBERS = ("zero", "int", "fraction", "exponent")
CHARACTER_CLASSES = dict.fromkeys("123456789", "9") | {c: c for c in "0-+."} | {"e": "e", "E": "e"}


@dataclass(slots=True)
class Member:
    """A member of the outermost object, as positions in its text."""

    key_start: int
    key_end: int = -1
    value_start: int = -1
    value_end: int = -1  # -1: it has not ended.


class JsonScanner:
    def __init__(self) -> None:
        self.members: list[Member] = []
        self.done = False  # The object is complete.
        self.failed = False  # The text is not the beginning of an object.
        self._position = 0  # Characters consumed so far.
        self._stack: list[str] = []  # Open brackets.
        self._state = "start"
        self._rest = ""  # What must follow of a literal; the state of a number; key or value.
        self._digits = 0  # Hexadecimal digits to come.

    def feed(self, text: str) -> int:
        """The number of characters that belong to the object; fewer if it ends or fails there."""
        index = 0
        while index < len(text) and not (self.done or self.failed):
            used = self._step(text, index)
            index += used
            self._position += used
        return index

    @property
    def is_in_string(self) -> bool:
        return not self.failed and self._state == "string"

    def _step(self, text: str, index: int) -> int:
        char, state = text[index], self._state
        if state == "string":
            return self._string(text, index)
        if state in ("escape", "unicode"):
            return self._escape(char)
        if state == "number":
            return self._number(char)
        if state == "literal":
            self._expect(char == self._rest[0])
            self._rest = self._rest[1:]
            if not self._rest and not self.failed:
                self._end_value(self._position + 1)
            return self._used()
        if char in WHITESPACE and state != "start":
            return 1
        self._structure(char)
        return self._used()

    def _structure(self, char: str) -> None:
        state = self._state
        if state in ("value", "first item", "start"):
            if state == "first item" and char == "]":
                self._close(char)
            else:
                self._begin_value(char)
        elif state in ("key", "first key"):
            if state == "first key" and char == "}":
                self._close(char)
            else:
                self._expect(char == '"')
                self._begin_key()
        elif state == "colon":
            self._expect(char == ":")
            self._state = "value"
        elif char == ",":  # After a value.
            self._state = "key" if self._stack[-1] == "{" else "value"
        else:
            self._close(char)

    def _begin_key(self) -> None:
        if len(self._stack) == 1:
            self.members.append(Member(self._position))
        self._state, self._rest = "string", "key"

    def _begin_value(self, char: str) -> None:
        self._expect(self._state != "start" or char == "{")
        if len(self._stack) == 1:
            self.members[-1].value_start = self._position
        if char in "{[":
            self._expect(len(self._stack) < MAX_DEPTH)
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first item"
        elif char == '"':
            self._state, self._rest = "string", "value"
        elif char in LITERALS:
            self._state, self._rest = "literal", LITERALS[char][1:]
        else:
            self._expect(char == "-" or (char in CHARACTER_CLASSES and char in "0123456789"))
            self._state = "number"
            self._rest = {"-": "-", "0": "zero"}.get(char, "int")

    def _close(self, char: str) -> None:
        self._expect(char == {"{": "}", "[": "]"}[self._stack[-1]])
        if not self.failed:
            self._stack.pop()
            self._end_value(self._position + 1)

    def _end_value(self, position: int) -> None:
        self._state = "after value"
        if len(self._stack) == 1:
            self.members[-1].value_end = position
        self.done = not self._stack

    def _string(self, text: str, index: int) -> int:
        body = STRING_BODY.match(text, index)
        assert body is not None
        end = body.end()
        if end > index:
            return end - index
        if text[end] == "\\":
            self._state = "escape"
        elif text[end] == '"' and self._rest == "key":
            self._state = "colon"
            if len(self._stack) == 1:
                self.members[-1].key_end = self._position + 1
        elif text[end] == '"':
            self._end_value(self._position + 1)
        else:
            self.failed = True
        return self._used()

    def _escape(self, char: str) -> int:
        if self._state == "escape":
            self._expect(char in '"\\/bfnrtu')
            self._state = "unicode" if char == "u" else "string"
            self._digits = 4
        else:
            self._expect(char in "0123456789abcdefABCDEF")
            self._digits -= 1
            self._state = "unicode" if self._digits else "string"
        return self._used()

    def _number(self, char: str) -> int:
        following = NUMBER_STEPS[self._rest].get(CHARACTER_CLASSES.get(char, ""))
        if following is not None:
            self._rest = following
            return 1
        self._expect(self._rest in COMPLETE_NUMBERS)
        if not self.failed:
            self._end_value(self._position)
        return 0  # The character follows the number.

    def _expect(self, holds: bool) -> None:
        if not holds:
            self.failed = True

    def _used(self) -> int:
        return 0 if self.failed else 1

"""CallObject: a tool call that is written as a JSON object, as its text arrives.

{"name": "add", "arguments": {"a": 1}}
"""

import json
from dataclasses import dataclass
from io import StringIO

from peagle.server.parsing.formats.json_scanner import JsonScanner, Member

MAX_KEY_CHARS = 32  # Longer keys are none that a call needs.


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON text of an object.


class JsonObject:
    """The text of a JSON object, as it arrives."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._text = StringIO()
        self._size = 0

    def feed(self, text: str) -> int:
        """The number of characters that belong to the object."""
        used = self._scanner.feed(text)
        self._text.seek(self._size)
        self._text.write(text[:used])
        self._size += used
        return used

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def failed(self) -> bool:
        return self._scanner.failed

    @property
    def text(self) -> str:
        """The whole text so far, verbatim."""
        return self._text.getvalue()

    def _slice(self, start: int, end: int) -> str:
        self._text.seek(start)
        return self._text.read(end - start)


class ArgumentsObject(JsonObject):
    """The arguments of a call whose name is known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._taken = 0  # Characters that were taken.

    def call(self) -> Call | None:
        """The call, if the arguments are complete and valid."""
        return Call(self.name, self.text) if self.done and is_loadable(self.text) else None

    @property
    def has_arguments(self) -> bool:
        return self._size > 0

    def take_arguments(self) -> str:
        """The text that has arrived since the last time."""
        start, self._taken = self._taken, self._size
        return self._slice(start, self._size)


class CallObject(JsonObject):
    """A name and arguments in one object, in any order."""

    def __init__(
        self, argument_keys: tuple[str, ...] = ("arguments",), needs_arguments: bool = False
    ) -> None:
        """`needs_arguments`: an object with a name only is no call."""
        super().__init__()
        self._argument_keys = tuple(f'"{key}"' for key in argument_keys)
        self._needs_arguments = needs_arguments
        self._next_member = 0  # Members before it have been looked at.
        self._name: Member | None = None
        self._arguments: Member | None = None
        self._taken = 0  # Characters of the arguments that were taken.

    def feed(self, text: str) -> int:
        used = super().feed(text)
        self._read_members()
        return used

    def call(self) -> Call | None:
        """The call, if the object is complete and a valid one."""
        name = self.name
        if not self.done or name is None:
            return None
        if self._arguments is None:
            return None if self._needs_arguments else Call(name, "{}")
        arguments = self._slice(self._arguments.value_start, self._arguments.value_end)
        valid = arguments.startswith("{") and is_loadable(arguments)
        return Call(name, arguments) if valid else None

    @property
    def name(self) -> str | None:
        """The function's name, as soon as it is known."""
        if self._name is None:
            return None
        return function_name(self._slice(self._name.value_start, self._name.value_end))

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments, an object, have begun."""
        if self._arguments is None:
            return False
        start = self._arguments.value_start
        return self._slice(start, start + 1) == "{"

    def take_arguments(self) -> str:
        """The text of the arguments that has arrived since the last time."""
        if self._arguments is None:
            return ""
        start = self._arguments.value_start + self._taken
        end = self._arguments.value_end if self._arguments.value_end >= 0 else self._size
        self._taken += end - start
        return self._slice(start, end)

    def _read_members(self) -> None:
        members = self._scanner.members
        while self._next_member < len(members):
            member = members[self._next_member]
            if member.value_start < 0:
                return
            is_short = member.key_end - member.key_start <= MAX_KEY_CHARS
            key = self._slice(member.key_start, member.key_end) if is_short else ""
            if key in self._argument_keys and not self._taken:
                self._arguments = member
            if member.value_end < 0:
                return
            if key == '"name"':
                self._name = member
            self._next_member += 1


def is_loadable(text: str) -> bool:
    """Whether clients can read this JSON text: Python refuses integers of thousands of digits."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def function_name(json_text: str) -> str | None:
    """The name in a JSON string; None: it is no usable one, or not a string."""
    if not json_text.startswith('"'):
        return None
    name = str(json.loads(json_text))
    # A lone surrogate (\\ud800) cannot be sent to the client.
    return name if name and not any("\ud800" <= char <= "\udfff" for char in name) else None

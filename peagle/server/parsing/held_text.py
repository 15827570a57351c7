"""Where a text may end with the beginning of a marker, which must be held back."""

from collections.abc import Iterable


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """The position of the marker that begins first, and this marker; (-1, ""): none is there.

    >>> find_first("a\\n<b>", ("<b>", "\\n<b>"))
    (1, '\\n<b>')
    """
    position, found = -1, ""
    for marker in markers:
        start = text.find(marker, 0, position + len(marker) if found else len(text))
        if start >= 0 and (not found or start < position):
            position, found = start, marker
    return position, found


def held_back(text: str, markers: Iterable[str]) -> int:
    """The length of the longest end of the text that may begin a marker.

    >>> held_back("some <to", ("<tool_call>",))
    3
    """
    longest = 0
    for marker in markers:
        start = max(0, len(text) - len(marker) + 1)
        while (start := text.find(marker[0], start)) >= 0:
            if marker.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start += 1
    return longest

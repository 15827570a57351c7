"""The exception for mistakes of the user: one line that says what is wrong and names the fix.

The library names arguments in backticks (`kv_tokens`); the CLI replaces them by its options.
"""


class UserError(ValueError):
    """Shown as one line, without a traceback; the CLI exits with code 2."""


class ChecksumError(UserError):
    """Downloaded data does not match the pinned checksum. No other source is tried after it."""


def did_you_mean(word: str, known: list[str]) -> str:
    """ " Did you mean 'x'?" for the known word closest to `word`, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""

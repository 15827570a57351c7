"""The one exception a user's mistake raises: a line that says what is wrong and names the fix."""


class UserError(ValueError):
    """Shown as one line, without a traceback; the CLI exits with code 2."""


class ChecksumError(UserError):
    """What came is not what was pinned: no other source is tried behind the user's back."""


def nearest(word: str, known: list[str]) -> str:
    """' Did you mean X?' for a misspelt word, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""

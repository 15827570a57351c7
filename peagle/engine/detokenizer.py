"""Detokenizer: the text of one answer as its tokens arrive, and its stop strings.

Only a window of recent tokens is decoded. The last shown tokens are the context of the new ones,
because a tokenizer may drop the space of a first token; where tokens are plain bytes, no context is
needed. Incomplete characters wait: a decoder turns them into replacement characters at the end of
the text (some decoders even replace complete characters before them, if those are bytes).

    context  new            decode(context + new)     shown: len(decode(context)) = 3
    "the"    " caf" 0xc3    "the caf\ufffd"           " caf" can be shown, the character waits
             0xa9           "the café"                "é"; no character waits, so the new tokens
                                                      become the context

A stop string may begin in one step and end in the next, or lie inside a block of accepted drafts.
Text that may be the beginning of a stop string is held back. The stop string that is complete first
ends the answer, independent of the steps: the answer is the same with and without speculation. The
first `min_tokens` tokens are not searched.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from peagle.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # The decoder's output for an incomplete character.
# The steps of the decoder that transformers builds for a tokenizer from a GGUF file.
GGUF_DECODER_STEPS = ["ByteFallback", "Fuse", "Replace", "ByteLevel"]
MAX_WAITING_TOKENS = 64  # With more tokens waiting, the window is cut inside them.


class DetokenizedText(NamedTuple):
    text: str  # Can be shown now.
    stopped: bool
    tokens_used: int  # Pushed tokens up to the one that completed a stop string, or all.


class TokenDecoder(NamedTuple):
    decode: Callable[[list[int]], str]
    context_free: bool  # Tokens are bytes of the text, whatever comes before them.


NO_TEXT = TokenDecoder(lambda ids: "", True)


class Detokenizer:
    def __init__(
        self,
        decoder: TokenDecoder | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`decoder`: None without a tokenizer; the text is empty then."""
        if stop and decoder is None:
            raise UserError("`stop` needs a tokenizer: use `stop_ids` instead")
        assert all(stop), "an empty stop string would end every answer"
        self.decode, self.context_free = decoder or NO_TEXT
        self.stop = tuple(stop)
        self.include_stop = include_stop
        self.window: list[int] = []  # The context, then the tokens that are not all shown.
        self.context = 0  # Tokens of the context.
        self.shown = 0  # Characters of the decoded window that were taken from it.
        self.held_back = ""  # Taken, but it may be the beginning of a stop string.
        self.stopped = False
        self.stop_string: str | None = None  # The one that ended the answer.
        self.unsearched = min_tokens  # This many more tokens cannot end the answer.

    def push(self, tokens: Sequence[int]) -> DetokenizedText:
        """Add tokens; return the text that can be shown, up to a stop string."""
        if self.stopped:
            return DetokenizedText("", True, 0)
        if not self.stop:
            return DetokenizedText(self._take(tokens), False, len(tokens))
        unsearched = min(self.unsearched, len(tokens))
        self.unsearched -= unsearched
        unsearched_text = self._take(tokens[:unsearched]) if unsearched else ""
        before = list(self.window), self.context, self.shown
        text = self.held_back + self._take(tokens[unsearched:])
        span = self._find_stop(text)
        if span is None:
            self.held_back = self._stop_beginning(text)
            shown = text[: len(text) - len(self.held_back)]
            return DetokenizedText(unsearched_text + shown, False, len(tokens))
        start, end = span
        self.window, self.context, self.shown = before
        used = unsearched + self._tokens_until(end, tokens[unsearched:])
        self.held_back = ""
        self.stopped = True
        self.stop_string = text[start:end]
        shown = text[: end if self.include_stop else start]
        return DetokenizedText(unsearched_text + shown, True, used)

    def finish(self) -> str:
        """Return the text that was waiting for more tokens; no more will come."""
        rest = "" if self.stopped else self.held_back + self._decode(self.window)[self.shown :]
        self.held_back = ""
        self.stopped = True
        return rest

    def _take(self, tokens: Sequence[int]) -> str:
        """Add tokens to the window; return the text that they complete."""
        if self.context_free and not self.window:  # The usual case: nothing waits.
            text = self._decode(list(tokens))
            if not text.endswith(REPLACEMENT):
                return text
        self.window += tokens
        cut = len(self.window)
        text = self._decode(self.window)
        overdue = cut - self.context > MAX_WAITING_TOKENS
        if overdue and text.endswith(REPLACEMENT):
            cut = self._last_complete()
            text = self._decode(self.window[:cut])
        complete = cut < len(self.window) or not text.endswith(REPLACEMENT)
        end = len(text) if complete else len(text.rstrip(REPLACEMENT))
        new_text = text[self.shown : end]
        self.shown = max(self.shown, end)
        if complete and (new_text or overdue):
            self._advance(cut, len(text))
        return new_text

    def _last_complete(self) -> int:
        """The window up to the last token that completes a character.

        Bytes that never become characters are cut anywhere.
        """
        for cut in range(len(self.window) - 1, self.context, -1):
            if not self._decode(self.window[:cut]).endswith(REPLACEMENT):
                return cut
        return len(self.window) - 4

    def _advance(self, cut: int, length: int) -> None:
        """Make the tokens before `cut`, which are `length` characters, the context of the rest."""
        start = cut if self.context_free else self.context
        shown_beyond = self.shown - length
        self.window = self.window[start:]
        self.context = cut - start
        self.shown = len(self._decode(self.window[: self.context])) + shown_beyond

    def _decode(self, ids: list[int]) -> str:
        return self.decode(ids) if ids else ""

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first; the longer one of two."""
        starts = [(text.find(stop), stop) for stop in self.stop]
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(ends)[::-1] if ends else None

    def _stop_beginning(self, text: str) -> str:
        """The longest suffix of the text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self.stop):
                return suffix
        return ""

    def _tokens_until(self, end: int, tokens: Sequence[int]) -> int:
        """The number of tokens until the text, `held_back` included, has `end` characters."""
        length = len(self.held_back)
        for used, token in enumerate(tokens, 1):
            length += len(self._take([token]))
            if length >= end:
                return used
        return len(tokens)


def token_decoder(
    tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool = True
) -> TokenDecoder:
    """Decode ids to text; directly by the Rust tokenizer if possible."""
    from transformers import PreTrainedTokenizerFast

    passes_on = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    )
    if not passes_on or tokenizer.clean_up_tokenization_spaces:
        return TokenDecoder(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)), False
        )
    decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    if tokens_are_bytes(tokenizer, skip_special_tokens):
        return TokenDecoder(cached_decoder(decode), True)
    return TokenDecoder(decode, False)


def tokens_are_bytes(
    tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool = True
) -> bool:
    """Whether every shown token is a sequence of bytes, independent of its neighbors."""
    try:
        decoder = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    except Exception:  # There is no decoder, or it is a Python program.
        return False
    steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
    # Added tokens are text themselves; a GGUF decoder changes all but visible ASCII in them.
    added = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not (token.special and skip_special_tokens)
    ]
    visible = all("!" <= char <= "~" for content in added for char in content)
    return steps == ["ByteLevel"] or (steps == GGUF_DECODER_STEPS and visible)


def cached_decoder(decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
    """A faster `decode` for tokens that are bytes: complete characters come from a table."""
    texts: dict[int, str] = {}

    def decode_cached(ids: list[int]) -> str:
        for token in ids:
            if token not in texts:
                texts[token] = decode([token])
        text = "".join([texts[token] for token in ids])
        return decode(ids) if REPLACEMENT in text else text

    return decode_cached

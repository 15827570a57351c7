"""The text of one answer as its tokens arrive, and the stop strings in it.

Only a window of recent tokens is decoded: the tokens shown last are the context of the new ones, for a tokenizer may
drop the space of a first token (where tokens are plain bytes, none is needed). Half characters wait: a decoder makes
replacement characters of them, at the end (some decoders even of whole characters before them, if those are spelled in
bytes).

    context  new            decode(context + new)     shown: len(decode(context)) = 3
    "the"    " caf" 0xc3    "the caf\ufffd"           " caf" can be shown, the character waits
             0xa9           "the café"                "é": clean, so the new tokens become the context

A stop string may begin in one step and end in the next, or lie inside a block of accepted drafts. Text that may be the
beginning of one is held back. The stop string that is complete first ends the answer, whatever the steps were: the same
answer with and without speculation. The first `min_tokens` tokens are not searched.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle.errors import UserError

HALF = "\ufffd"
FROM_GGUF = [
    "ByteFallback",
    "Fuse",
    "Replace",
    "ByteLevel",
]  # steps of a decoder that transformers makes
WINDOW = 64  # tokens that may wait before a cut is looked for among them


class DetokenizedText(NamedTuple):
    text: str  # can be shown now
    stopped: bool
    tokens_used: int  # of those pushed: the last one used completed a stop string, or all were


class TokenDecoder(NamedTuple):
    decode: Callable[[list[int]], str]
    alone: bool  # tokens are bytes of the text: what comes before them does not matter


NO_TEXT = TokenDecoder(lambda ids: "", True)


class Detokenizer:
    def __init__(
        self,
        decoder: TokenDecoder | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`decoder`: None without a tokenizer."""
        if stop and decoder is None:
            raise UserError("stop strings need a tokenizer: use stop token ids instead")
        if not all(stop):
            raise UserError("an empty stop string would end every answer: leave it out")
        self.decode, self.alone = decoder or NO_TEXT
        self.stop, self.include_stop = tuple(stop), include_stop
        self.ids: list[int] = []  # the window: context, then tokens that are not all shown
        self.context = 0
        self.shown = 0  # characters of the decoded window that were taken from it
        self.held = ""  # taken, but it may be the beginning of a stop string
        self.stopped = False
        self.unsearched = min_tokens  # so many tokens to come cannot end the answer

    def push(self, tokens: Sequence[int]) -> DetokenizedText:
        if self.stopped:
            return DetokenizedText("", True, 0)
        if not self.stop:
            return DetokenizedText(self._take(tokens), False, len(tokens))
        free = min(self.unsearched, len(tokens))
        self.unsearched -= free
        safe = self._take(tokens[:free]) if free else ""
        before = list(self.ids), self.context, self.shown
        text = self.held + self._take(tokens[free:])
        found = self._find(text)
        if found is None:
            self.held = self._beginning(text)
            return DetokenizedText(safe + text[: len(text) - len(self.held)], False, len(tokens))
        self.ids, self.context, self.shown = before
        used = free + self._tokens_until(found[1], tokens[free:])
        self.held, self.stopped = "", True
        return DetokenizedText(
            safe + text[: found[1] if self.include_stop else found[0]], True, used
        )

    def finish(self) -> str:
        """What waited for more: nothing more will come."""
        rest = "" if self.stopped else self.held + self._decode(self.ids)[self.shown :]
        self.held, self.stopped = "", True
        return rest

    def _take(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add for good."""
        self.ids += tokens
        text, at = self._decode(self.ids), len(self.ids)
        late = at - self.context > WINDOW
        if late and text.endswith(HALF):
            at = self._last_whole()
            text = self._decode(self.ids[:at])
        whole = at < len(self.ids) or not text.endswith(HALF)
        end = len(text) if whole else len(text.rstrip(HALF))
        new, self.shown = text[self.shown : end], max(self.shown, end)
        if whole and (new or late):
            self._advance(at, len(text))
        return new

    def _last_whole(self) -> int:
        """The last token that ends with a character; bytes that never become characters are cut anywhere."""
        cuts = range(len(self.ids) - 1, self.context, -1)
        return next(
            (at for at in cuts if not self._decode(self.ids[:at]).endswith(HALF)), len(self.ids) - 4
        )

    def _advance(self, at: int, length: int) -> None:
        """The tokens before `at`, of so many characters, become the context of the rest, if it needs one."""
        beyond, start = self.shown - length, at if self.alone else self.context
        self.ids, self.context = self.ids[start:], at - start
        self.shown = len(self._decode(self.ids[: self.context])) + beyond

    def _decode(self, ids: list[int]) -> str:
        return self.decode(ids) if ids else ""

    def _find(self, text: str) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first; of two, the longer."""
        starts = [(text.find(stop), stop) for stop in self.stop]
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(ends)[::-1] if ends else None

    def _beginning(self, text: str) -> str:
        """The longest end of the text that some stop string begins with."""
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        return next((end for end in ends if any(stop.startswith(end) for stop in self.stop)), "")

    def _tokens_until(self, end: int, tokens: Sequence[int]) -> int:
        """How many of the tokens it takes until the held text and theirs have `end` characters."""
        length = len(self.held)
        for used, token in enumerate(tokens, 1):
            length += len(self._take([token]))
            if length >= end:
                return used
        return len(tokens)


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> TokenDecoder:
    """Ids to text without special tokens. Where transformers would only pass them on, its road is left out."""
    fast = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    )
    if not fast or tokenizer.clean_up_tokenization_spaces:
        return TokenDecoder(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), False)
    decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    alone = tokens_are_bytes(tokenizer)
    return TokenDecoder(by_token(decode) if alone else decode, alone)


def tokens_are_bytes(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Of the text, and nothing else. Added tokens are text as they stand."""
    try:
        told = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    except Exception:  # no decoder, or one that is a program
        return False
    steps = [step.get("type") for step in told.get("decoders", [told])]
    added = [
        token.content for token in tokenizer.added_tokens_decoder.values() if not token.special
    ]
    visible = all("!" <= char <= "~" for content in added for char in content)
    return steps == ["ByteLevel"] or (steps == FROM_GGUF and visible)


def by_token(decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
    """The same for tokens that are bytes of the text, and faster: those that are whole characters are looked up."""
    known: dict[int, str] = {}

    def joined(ids: list[int]) -> str:
        for token in ids:
            if token not in known:
                known[token] = decode([token])
        text = "".join([known[token] for token in ids])
        return decode(ids) if HALF in text else text

    return joined

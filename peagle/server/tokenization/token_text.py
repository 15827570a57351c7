"""TokenTexts: the text and the bytes of single tokens, for log-probabilities and traces."""

import re
from typing import Any

SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SENTENCEPIECE_SPACE = "\u2581"


def byte_level_alphabet() -> dict[str, int]:
    """The byte for each character of byte-level BPE.

    Printable bytes stand for themselves; the others are written as characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.alphabet = byte_level_alphabet() if byte_level else {}
        self._cache: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """The bytes of a token; they may end in the middle of a character."""
        if token not in self._cache:
            self._cache[token] = self._encode(token)
        return self._cache[token]

    def text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", errors="replace")

    def _encode(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self.special_ids:
            return str(piece).encode()
        if self.alphabet:
            if all(letter in self.alphabet for letter in piece):
                return bytes(self.alphabet[letter] for letter in piece)
            return str(piece).encode()  # An added token is stored as plain text.
        if match := SENTENCEPIECE_BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace(SENTENCEPIECE_SPACE, " ").encode()

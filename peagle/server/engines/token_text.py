"""What single tokens look like: text for people, bytes for those who put half characters together again."""

import re
from typing import Any

SPELLED = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte, as SentencePiece writes it


def byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes with: printable ones stand for themselves, the rest from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenTexts:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.letters = byte_letters() if "ByteLevel" in str(getattr(backend, "decoder", "")) else {}
        self._known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", errors="replace")

    def _spell(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self.special:
            return str(piece).encode()
        if self.letters:
            if all(letter in self.letters for letter in piece):
                return bytes(self.letters[letter] for letter in piece)
            return str(piece).encode()  # an added token is written as it is
        if found := SPELLED.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

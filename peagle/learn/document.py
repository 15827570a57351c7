"""StoredDocument: one answered request, as token ids. It names no user, key or request.

A document is one request, and is never joined with another one: tenants stay apart.
"""

import hashlib
import json
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE_TOKENS = 2048  # Token ids that are encoded without releasing the interpreter.
HELD_BACK_ONE_IN = 5


@dataclass(frozen=True, slots=True)
class StoredDocument:
    id: str  # document_id
    time: float  # Seconds since the epoch, when it was stored.
    prompt: list[int]
    answer: list[int]
    engine: str = ""

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)

    def line_pieces(self) -> Iterator[str]:
        """Yield its line in pieces, each encoded in a fraction of a millisecond."""
        head = {"id": self.id, "time": round(self.time, 3), "engine": self.engine}
        yield json.dumps(head)[:-1] + ', "prompt": ['
        yield from encode_pieces(self.prompt)
        yield '], "answer": ['
        yield from encode_pieces(self.answer)
        yield "]}\n"


def new_document(prompt: Sequence[int], answer: Sequence[int], engine: str = "") -> StoredDocument:
    id = document_id(prompt, answer)
    return StoredDocument(id, time.time(), list(prompt), list(answer), engine)


def parse_document(line: bytes) -> StoredDocument | None:
    """The document of a line; None: the line is torn or is no document."""
    try:
        values = json.loads(line)
        document = StoredDocument(**values)
        valid = all(map(is_token, document.prompt)) and all(map(is_token, document.answer))
        return document if valid and document.answer else None
    except (ValueError, TypeError):
        return None


def is_token(value: object) -> bool:
    return type(value) is int and value >= 0


def document_id(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """PROMPT-ANSWER, two digests: equal requests with equal answers have equal ids."""
    return f"{token_digest(prompt)}-{token_digest(answer)}"


def token_digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8).hexdigest()


def is_held_back(id: str) -> bool:
    """Whether a document is for judging and never for training: about every fifth one, for ever.

    The digest of the prompt decides, so that a repeated prompt is always on the same side.
    """
    prompt = id.partition("-")[0]
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"held-back").digest()
    return int.from_bytes(digest, "little") % HELD_BACK_ONE_IN == 0


def encode_pieces(tokens: Sequence[int]) -> Iterator[str]:
    for start in range(0, len(tokens), PIECE_TOKENS):
        piece = tokens[start : start + PIECE_TOKENS]
        yield ("," if start else "") + ",".join(map(str, piece))

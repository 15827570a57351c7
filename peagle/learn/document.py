"""StoredDocument: one answered request, as token ids. It names no user, key or request.

    {"id": "PROMPT-ANSWER", "time": 1.5, "engine": "engine", "prompt": "BwAAAA==", "answer": "..."}

Token ids are written as base64 of 32-bit integers: the thread that writes them takes a tenth of the
interpreter's time that decimal numbers would take from the engine. A document is one request, and
is never joined with another one: tenants stay apart.
"""

import hashlib
import json
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass

HELD_BACK_ONE_IN = 5
TOKEN_TYPE = "I"  # of array: 32 bits, without a sign
TOKEN_BYTES = 4


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


@dataclass(frozen=True, slots=True)
class DocumentHeader:
    """A document without its tokens: those of a large store do not fit into memory as lists."""

    id: str
    time: float
    tokens: int

    @property
    def prompt_digest(self) -> str:
        return self.id.partition("-")[0]


def new_document(prompt: Sequence[int], answer: Sequence[int], engine: str = "") -> StoredDocument:
    id = document_id(prompt, answer)
    return StoredDocument(id, time.time(), list(prompt), list(answer), engine)


def encode_line(document: StoredDocument) -> bytes:
    values = {
        "id": document.id,
        "time": document.time,
        "engine": document.engine,
        "prompt": pack_tokens(document.prompt),
        "answer": pack_tokens(document.answer),
    }
    return json.dumps(values).encode() + b"\n"


def parse_document(line: bytes) -> StoredDocument | None:
    """The document of a line; None: the line is torn or is no document."""
    try:
        values = json.loads(line)
        for name in ("prompt", "answer"):
            values[name] = unpack_tokens(values[name])
        document = StoredDocument(**values)
    except (ValueError, TypeError, KeyError):
        return None
    return document if document.answer else None


def parse_header(line: bytes) -> DocumentHeader | None:
    """The header of a line, in a fraction of the time; None: the line is torn or no document."""
    try:
        values = json.loads(line)
        tokens = [count_tokens(values[name]) for name in ("prompt", "answer")]
        header = DocumentHeader(str(values["id"]), float(values["time"]), sum(tokens))
    except (ValueError, TypeError, KeyError):
        return None
    return header if tokens[1] else None


def count_tokens(text: str) -> int:
    """The number of tokens in base64."""
    return (len(text) * 3 // 4 - text[-2:].count("=")) // TOKEN_BYTES


def pack_tokens(tokens: Sequence[int]) -> str:
    return b64encode(array(TOKEN_TYPE, tokens).tobytes()).decode()


def unpack_tokens(text: str) -> list[int]:
    tokens = array(TOKEN_TYPE)
    tokens.frombytes(b64decode(text, validate=True))
    return tokens.tolist()


def document_id(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """PROMPT-ANSWER, two digests: equal requests with equal answers have equal ids."""
    return f"{token_digest(prompt)}-{token_digest(answer)}"


def token_digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array(TOKEN_TYPE, tokens).tobytes(), digest_size=8).hexdigest()


def is_held_back(id: str) -> bool:
    """Whether a document is for judging and never for training: about every fifth one, for ever.

    The digest of the prompt decides, so that a repeated prompt is always on the same side.
    """
    prompt = id.partition("-")[0]
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"held-back").digest()
    return int.from_bytes(digest, "little") % HELD_BACK_ONE_IN == 0

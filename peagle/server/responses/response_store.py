"""ResponseStore: finished responses in memory, for previous_response_id and GET.

It is limited in responses and bytes, as a whole and for each API key; the oldest make room. A
response is only found with the salt (http/cache_salt.py) of the request that created it: the same
API key and the same `cache_salt`.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from peagle.server.translation.conversation import ChatMessage

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
KEY_SHARE = 4  # A key of several may take one part in so many.
decode_messages = msgspec.json.Decoder(list[ChatMessage]).decode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the conversation that ends with it, without instructions."""

    key_digest: bytes  # Of the API key, which its memory is counted for; b"": no key.
    salt: str
    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)

    def conversation(self) -> list[ChatMessage]:
        return decode_messages(self.messages)


@dataclass(slots=True)
class Usage:
    responses: int = 0
    size: int = 0

    def add(self, stored: StoredResponse, sign: int = 1) -> None:
        self.responses += sign
        self.size += sign * stored.size

    def exceeds(self, responses: int, size: int) -> bool:
        return self.responses > responses or self.size > size


class ResponseStore:
    def __init__(
        self, keys: int = 1, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        """`keys`: number of API keys."""
        share = KEY_SHARE if keys > 1 else 1
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.max_key_responses = max_responses // share
        self.max_key_bytes = max_bytes // share
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # Oldest first.
        self._usage = Usage()
        self._key_usage: dict[bytes, Usage] = {}

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def size(self) -> int:
        return self._usage.size

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than all that its key may store."""
        key_digest = stored.key_digest
        if stored.size > self.max_key_bytes:
            return
        self._responses[response_id] = stored
        self._usage.add(stored)
        key_usage = self._key_usage.setdefault(key_digest, Usage())
        key_usage.add(stored)
        while key_usage.exceeds(self.max_key_responses, self.max_key_bytes):
            self._evict(lambda other: other.key_digest == key_digest)
        while self._usage.exceeds(self.max_responses, self.max_bytes):
            self._evict(lambda other: True)

    def get(self, response_id: str, salt: str) -> StoredResponse | None:
        stored = self._responses.get(response_id)
        return stored if stored is not None and stored.salt == salt else None

    def delete(self, response_id: str, salt: str) -> bool:
        """Return whether there was one."""
        if self.get(response_id, salt) is None:
            return False
        self._remove(response_id)
        return True

    def _evict(self, condition: Callable[[StoredResponse], bool]) -> None:
        """Remove the oldest response that meets the condition."""
        self._remove(next(key for key, other in self._responses.items() if condition(other)))

    def _remove(self, response_id: str) -> None:
        stored = self._responses.pop(response_id)
        self._usage.add(stored, -1)
        key_usage = self._key_usage[stored.key_digest]
        key_usage.add(stored, -1)
        if not key_usage.responses:
            del self._key_usage[stored.key_digest]


def encode_messages(messages: list[ChatMessage]) -> bytes:
    return msgspec.json.encode(messages)


def encode_response(response: dict[str, Any]) -> bytes:
    return msgspec.json.encode(response)

"""The salt of a request's prefixes in the KV cache.

A known prefix is answered faster, so a shared cache tells one client what others have asked.
Requests share prefixes only if they come with the same API key and the same `cache_salt`; on a
server without keys, all requests without a `cache_salt` share them.
"""

import hmac
import os
import secrets
from typing import Any

from starlette.types import Scope

from peagle.server.http.auth import API_KEY_DIGEST
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import MAX_NAME_CHARS

# Nobody can compute the salt of another client: it is not derived from the key alone.
# Fronts of one server have the same secret, in their environment.
SECRET_VARIABLE = "PEAGLE_CACHE_SECRET"
SECRET = bytes.fromhex(os.environ.pop(SECRET_VARIABLE, "")) or secrets.token_bytes(32)


def derive_salt(scope: Scope, requested: str | None) -> str:
    """The salt of a request, whose body asks for `requested`; "": shared by all."""
    key_digest: bytes = scope.get(API_KEY_DIGEST, b"")
    if not key_digest and not requested:
        return ""
    # The length keeps the two parts apart.
    message = bytes([len(key_digest)]) + key_digest + (requested or "").encode()
    return hmac.digest(SECRET, message, "sha256").hex()


def with_salt(scope: Scope, body: dict[str, Any]) -> dict[str, Any]:
    """The body for a worker, which sees no key: the salt of this server replaces the client's."""
    requested = body.get("cache_salt")
    if requested is not None and not is_salt(requested):
        raise ApiError(
            400, f"cache_salt must be a string of 1 to {MAX_NAME_CHARS} characters", "cache_salt"
        )
    salt = derive_salt(scope, requested)
    return body | {"cache_salt": salt} if salt else body


def is_salt(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARS

"""API keys, compared in constant time. Health, metrics and the page need no key.

A key is sent as OpenAI's clients do, Authorization: Bearer KEY, or as Anthropic's, x-api-key: KEY.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.server.http.errors import ApiError

API_KEY_DIGEST = "peagle.api_key_digest"  # of the key that a request came with, in its scope
PUBLIC_PATHS = ("/", "/health", "/ping", "/metrics", "/version")  # and /page/*


def digest(key: str) -> bytes:
    """Comparing digests leaks neither the length nor a prefix of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Auth:
    """Middleware: requests without a valid key get a 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.digests and not is_public(scope["path"]):
            given_keys = keys_of(Headers(scope=scope))
            key_digest = self._accept(given_keys)
            if key_digest is None:
                problem = "the API key is wrong" if given_keys else "the API key is missing"
                error = ApiError(401, f"{problem}: send Authorization: Bearer KEY, or x-api-key")
                await error.response(scope["path"])(scope, receive, send)
                return
            scope[API_KEY_DIGEST] = key_digest
        await self.app(scope, receive, send)

    def _accept(self, given_keys: Sequence[str]) -> bytes | None:
        """Return the digest of the first valid key; None: there is none."""
        for given in map(digest, given_keys):
            # Compare with every key, so that the time does not depend on which one matches.
            matches = [hmac.compare_digest(given, known) for known in self.digests]
            if any(matches):
                return given
        return None


def keys_of(headers: Headers) -> list[str]:
    """The keys that a request was sent with; "" for an Authorization of another scheme."""
    keys = []
    if authorization := headers.get("authorization", ""):
        scheme, _, key = authorization.partition(" ")
        keys.append(key.strip() if scheme.lower() == "bearer" else "")
    if key := headers.get("x-api-key", "").strip():
        keys.append(key)
    return keys


def is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith("/page/")

"""Who may ask: a bearer key, compared in constant time. Health, metrics and the page are open."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.server.http.errors import ApiError

OPEN = ("/", "/health", "/ping", "/metrics", "/version")  # and /page/*


class Keys:
    """Digests, so that neither length nor beginning of a key can be told from the time a comparison takes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.digests = [digest(key) for key in keys]

    def allow(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = digest(key.strip() if scheme.lower() == "bearer" else "")
        found = [hmac.compare_digest(given, known) for known in self.digests]  # all of them, always
        return any(found)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Auth:
    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.keys = app, Keys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.keys.digests and not is_open(scope["path"]):
            header = Headers(scope=scope).get("authorization", "")
            if not self.keys.allow(header):
                message = "the key is wrong" if header else "a key is missing"
                await ApiError(401, f"{message}: send Authorization: Bearer KEY").response(
                    scope, receive, send
                )
                return
        await self.app(scope, receive, send)


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith("/page/")

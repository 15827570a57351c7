"""Which web pages may ask a server that asks for no key: its own, and those it was told of.

Browsers send along where a page came from (Origin), and what they think this server is called (Host). A page of
somebody else's must not use a server on this machine; and where its owner lets his own name point to this machine, the
name tells it apart. Other clients send no Origin, and call the server by its address.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.server.http.auth import is_open
from peagle.server.http.errors import ApiError
from peagle.server.settings import ServerSettings


class Origins:
    def __init__(self, app: ASGIApp, how: ServerSettings) -> None:
        self.app, self.asks_keys = app, bool(how.api_keys)
        self.local = how.socket is None and is_loopback(how.host)
        self.allowed = {place_of(origin) for origin in how.allow_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.asks_keys and not is_open(scope["path"]):
            headers = Headers(scope=scope)
            if wrong := self.refused(headers.get("origin"), headers.get("host", "")):
                await ApiError(403, f"{wrong}: set --api-key, or --allow-origin").response(
                    scope, receive, send
                )
                return
        await self.app(scope, receive, send)

    def refused(self, origin: str | None, host: str) -> str | None:
        if origin is not None and place_of(origin) not in {host.lower(), *self.allowed}:
            return "pages of another origin are not answered"
        known = not host or is_loopback(name_of(host)) or host.lower() in self.allowed
        return (
            None
            if known or not self.local
            else "this server is on loopback and does not answer to that name"
        )


def place_of(origin: str) -> str:
    """https://Example.org:81 -> example.org:81"""
    return origin.partition("://")[2].rstrip("/").lower() or origin


def name_of(host: str) -> str:
    """[::1]:8000 -> ::1"""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False

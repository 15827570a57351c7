"""Protection from other web pages, for a server without API keys.

Browsers send the origin of the page (Origin) and the name under which they reach the server (Host).
A foreign page must not use a server on this machine, so its Origin is refused. With DNS rebinding,
a foreign page points its own name to this machine and Origin equals Host; a server on a loopback
address therefore also refuses names other than loopback ones. Other clients send no Origin, and
reach the server by its address.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.server.http.auth import is_public
from peagle.server.http.errors import ApiError
from peagle.server.settings import ServerSettings


class Origins:
    """Middleware: requests of foreign web pages get a 403."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.has_keys = bool(settings.api_keys)
        self.on_loopback = is_loopback(settings.host)
        self.allowed = {parse_origin(origin) for origin in settings.allow_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.has_keys and not is_public(scope["path"]):
            headers = Headers(scope=scope)
            if problem := self.find_problem(headers.get("origin"), headers.get("host", "")):
                error = ApiError(403, f"{problem}: set --api-key, or --allow-origin")
                await error.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def find_problem(self, origin: str | None, host: str) -> str | None:
        """Return why a request with these headers is refused; None if it is accepted."""
        if origin is not None and parse_origin(origin) not in {host.lower(), *self.allowed}:
            return "web pages of another origin may not use this server"
        known = not host or is_loopback(parse_host(host)) or host.lower() in self.allowed
        if known or not self.on_loopback:
            return None
        return "this server is on loopback and does not answer to that host name"


def parse_origin(origin: str) -> str:
    """https://Example.org:81 -> example.org:81"""
    return origin.partition("://")[2].rstrip("/").lower() or origin


def parse_host(host: str) -> str:
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

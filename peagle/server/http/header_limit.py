"""The head of a request: no longer than allowed. It is read before anybody is asked for a key.

httptools joins what has come of a header for ever; h11, where httptools is missing, has such a limit of its own.
"""

import asyncio
from importlib.util import find_spec
from typing import Literal

from peagle.server.http.errors import ApiError

MAX_HEADER_BYTES = (
    1 << 16
)  # bytes that may come without anything that can be passed on: a head, or what follows a chunked body


def limited_protocol() -> "type[asyncio.Protocol] | Literal['h11']":
    if find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        kept = 0  # bytes since the parser told something

        def data_received(self, data: bytes) -> None:
            self.kept += len(data)
            super().data_received(data)
            if self.kept > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(refusal())
                self.transport.close()

        def on_headers_complete(self) -> None:
            self.kept = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.kept = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.kept = 0
            super().on_message_complete()

    return Bounded


def refusal() -> bytes:
    reply = ApiError(
        431, f"the headers are longer than {MAX_HEADER_BYTES >> 10} KB: send fewer"
    ).response
    reply.headers["connection"] = "close"
    lines = [
        b"HTTP/1.1 431 Request Header Fields Too Large",
        *(b": ".join(header) for header in reply.raw_headers),
    ]
    return b"\r\n".join([*lines, b"", bytes(reply.body)])

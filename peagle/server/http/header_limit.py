"""A limit on the size of request headers, which are read before the API key is checked.

The httptools parser buffers a header of any length; h11, used where httptools is missing, has a
limit of its own.
"""

import asyncio
from importlib.util import find_spec
from typing import Literal

from peagle.server.http.errors import ApiError

# Bytes that may arrive without a complete header section or a piece of a body: headers, or the
# trailers of a chunked body.
MAX_HEADER_BYTES = 1 << 16


def limited_protocol() -> "type[asyncio.Protocol] | Literal['h11']":
    """Return what uvicorn takes as its `http` setting."""
    if find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedProtocol(HttpToolsProtocol):
        buffered_bytes = 0  # received since the parser's last callback

        def data_received(self, data: bytes) -> None:
            self.buffered_bytes += len(data)
            super().data_received(data)
            if self.buffered_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(too_large_response())
                self.transport.close()

        def on_headers_complete(self) -> None:
            self.buffered_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.buffered_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.buffered_bytes = 0
            super().on_message_complete()

    return LimitedProtocol


def too_large_response() -> bytes:
    """Return a whole HTTP response with status 431."""
    message = f"the headers are longer than {MAX_HEADER_BYTES >> 10} KB: send fewer"
    response = ApiError(431, message).response
    response.headers["connection"] = "close"
    lines = [
        b"HTTP/1.1 431 Request Header Fields Too Large",
        *(b": ".join(header) for header in response.raw_headers),
    ]
    return b"\r\n".join([*lines, b"", bytes(response.body)])

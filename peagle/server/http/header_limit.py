"""The protocol of a connection, with limits that hold before the API key is checked.

The httptools parser buffers a header of any length; h11, used where httptools is missing, has a
limit of its own.
"""

import asyncio
from importlib.util import find_spec
from typing import Any

from peagle.server.http.connections import Connections, raw_response
from peagle.server.http.errors import ApiError

# Bytes that may arrive without a complete header section or a piece of a body: headers, or the
# trailers of a chunked body.
MAX_HEADER_BYTES = 1 << 16


def server_protocol(connections: Connections) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with limits, as its `http` setting."""
    base: Any = limited_protocol()

    class WatchedProtocol(base):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            connections.opened(self)

        def connection_lost(self, error: Exception | None) -> None:
            connections.lost(self)
            super().connection_lost(error)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            connections.responded(self)

    return WatchedProtocol


def limited_protocol() -> type[asyncio.Protocol]:
    if find_spec("httptools") is None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedProtocol(HttpToolsProtocol):
        buffered_bytes = 0  # received since the parser's last callback

        def data_received(self, data: bytes) -> None:
            self.buffered_bytes += len(data)
            super().data_received(data)
            if self.buffered_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(raw_response(too_large()))
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


def too_large() -> ApiError:
    return ApiError(431, f"the headers are longer than {MAX_HEADER_BYTES >> 10} KB: send fewer")

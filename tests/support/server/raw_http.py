"""Bytes on a socket, for requests that an HTTP client would not send."""

import re
import socket
import time
from dataclasses import dataclass

STATUS_LINE = re.compile(rb"HTTP/1\.\d (\d{3})")


@dataclass(frozen=True)
class RawReply:
    data: bytes
    closed: bool  # by the server

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in STATUS_LINE.findall(self.data)]

    @property
    def lists_models(self) -> bool:
        return b'"object":"list"' in self.data


def exchange(port: int, data: bytes, quiet_seconds: float = 1.5) -> RawReply:
    """Send these bytes; return what arrives until nothing has come for a while."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        first = time.monotonic() + 30
        while True:
            connection.settimeout(quiet_seconds if received else first - time.monotonic())
            try:
                chunk = connection.recv(1 << 16)
            except TimeoutError:
                return RawReply(received, False)
            except ConnectionError:
                return RawReply(received, True)
            if not chunk:
                return RawReply(received, True)
            received += chunk

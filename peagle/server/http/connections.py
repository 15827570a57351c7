"""Connections: how many a server keeps open, and how long a client may let it wait.

A connection without a request in progress is idle: its client is silent, or sends headers slowly.
A stalled client does not read its answer. Both are disconnected after a time. When there are too
many connections, the longest idle one makes room: idle clients do not keep others out.
"""

import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.settings import ServerSettings

# Descriptors for everything but clients: files of the model, sockets of workers, pipes.
RESERVED_DESCRIPTORS = 256
MAX_DESCRIPTORS = 1 << 16
MIN_CONNECTIONS = 16
REASONS = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
# The end of `tcpi_bytes_acked`, 8 bytes long, in Linux's struct tcp_info.
ACKED_BYTES_END = 128
DELIVERY_SECONDS = 600.0  # where there is no time limit for answers


@dataclass(slots=True)
class ConnectionState:
    """One connection, as the last sweep saw it. Times are monotonic; 0: it is not so."""

    idle_since: float
    unsent_bytes: int = 0
    delivered_bytes: int = 0
    stalled_since: float = 0.0
    closing_since: float = 0.0


class Connections:
    """The open connections of a server, by uvicorn's protocol object, longest idle first."""

    def __init__(self, settings: ServerSettings, max_open: int) -> None:
        self.max_open = max_open
        self.wait_seconds = settings.receive_seconds
        self.delivery_seconds = settings.timeout or DELIVERY_SECONDS
        self.states: dict[Any, ConnectionState] = {}
        self._closed: Counter[str] = Counter()  # by reason, since the last log line

    def opened(self, protocol: Any) -> None:
        self.states[protocol] = ConnectionState(time.monotonic())
        if len(self.states) <= self.max_open:
            return
        oldest = next((other for other in self.states if is_idle(other)), protocol)
        if oldest is protocol:  # All others have a request in progress.
            self._closed["too many requests at once"] += 1
            respond_and_close(
                protocol, ApiError(503, "too many connections: try again later", retry_after=1)
            )
        else:
            self._closed["idle, to make room"] += 1
            oldest.transport.abort()
            self.lost(oldest)

    def responded(self, protocol: Any) -> None:
        """A response is complete: the connection is the one that became idle last."""
        state = self.states.pop(protocol, None)
        if state is not None:
            state.idle_since = time.monotonic()
            self.states[protocol] = state

    def lost(self, protocol: Any) -> None:
        self.states.pop(protocol, None)

    def sweep(self) -> None:
        """Disconnect clients that let the server wait for too long."""
        now = time.monotonic()
        for protocol, state in list(self.states.items()):
            self._observe(protocol, state, now)
            if reason := self._reason_to_abort(state, now):
                self._closed[reason] += 1
                protocol.transport.abort()
            elif is_idle(protocol) and now - state.idle_since > self.wait_seconds:
                self._close_idle(protocol)
        if self._closed:
            log_event("connections closed", reasons=dict(self._closed))
            self._closed.clear()

    def _observe(self, protocol: Any, state: ConnectionState, now: float) -> None:
        unsent = protocol.transport.get_write_buffer_size()
        delivered = delivered_bytes(protocol) if unsent else 0
        progress = unsent < state.unsent_bytes or delivered > state.delivered_bytes
        if not unsent:
            state.stalled_since = 0.0
        elif progress or not state.stalled_since:
            state.stalled_since = now
        state.unsent_bytes = unsent
        state.delivered_bytes = delivered
        if protocol.transport.is_closing() and not state.closing_since:
            state.closing_since = now

    def _reason_to_abort(self, state: ConnectionState, now: float) -> str | None:
        if state.stalled_since and now - state.stalled_since > self.wait_seconds:
            return "the client does not read"
        if state.closing_since and now - state.closing_since > self.delivery_seconds:
            return "the client reads too slowly"
        return None

    def _close_idle(self, protocol: Any) -> None:
        if getattr(protocol, "buffered_bytes", 0):
            self._closed["the headers were not complete in time"] += 1
            seconds = self.wait_seconds
            message = f"the headers were not complete after {seconds:g} seconds"
            respond_and_close(protocol, ApiError(408, message))
        else:
            protocol.transport.close()


def delivered_bytes(protocol: Any) -> int:
    """Bytes that the client's side has acknowledged; 0 where the system does not tell.

    Our own buffer may stay as long as it is while the client empties those of the system.
    """
    tcp_info = getattr(socket, "TCP_INFO", None)
    connection = protocol.transport.get_extra_info("socket")
    if tcp_info is None or connection is None or connection.family == socket.AF_UNIX:
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, tcp_info, ACKED_BYTES_END)
    if len(info) < ACKED_BYTES_END:
        return 0
    return int.from_bytes(info[ACKED_BYTES_END - 8 :], sys.byteorder)


def is_idle(protocol: Any) -> bool:
    """Return whether there is no request in progress; a connection that closes has one no more."""
    cycle = protocol.cycle
    return (cycle is None or cycle.response_complete) and not protocol.transport.is_closing()


def respond_and_close(protocol: Any, error: ApiError) -> None:
    """Send a whole response outside of any request, and close the connection."""
    protocol.transport.write(raw_response(error))
    protocol.transport.close()


def raw_response(error: ApiError) -> bytes:
    """Return the bytes of a response after which the connection is closed."""
    response = error.response()
    response.headers["connection"] = "close"
    lines = [
        b"HTTP/1.1 %d %s" % (error.status, REASONS[error.status].encode()),
        *(b": ".join(header) for header in response.raw_headers),
    ]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as the system allows; return it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return MAX_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connection_limit(settings: ServerSettings, descriptors: int) -> int:
    """Connections of clients that leave enough descriptors for everything else."""
    # A request that is relayed to vLLM has a second connection.
    per_connection = 2 if settings.engine == "vllm" else 1
    return max(MIN_CONNECTIONS, (descriptors - RESERVED_DESCRIPTORS) // per_connection)

"""Clients that stay silent, send headers slowly or do not read are disconnected."""

import json
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from peagle.server.http import connections
from peagle.server.http.connections import (
    Connections,
    connection_limit,
    delivered_bytes,
    raise_descriptor_limit,
)
from peagle.server.openai import answer
from peagle.server.web_server import Server
from tests.support.server.serving import (
    SETTINGS,
    TEXT,
    all_idle,
    make_backend,
    raw_request,
    read_reply,
    running,
)
from tests.support.waiting import wait_for

HEAD = "POST /v1/completions HTTP/1.1\nhost: 127.0.0.1\ncontent-type: application/json\n"
LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
SMALL_BUFFER = 4096
INCOMPLETE = (b"GET /health HTTP/1.1\r\n", b"host: 127.0.0.1\r\n", b"x-a: b", b"c")


class FakeTransport:
    def __init__(self) -> None:
        self.unsent = 0
        self.written = b""
        self.closing = False
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


class FakeCycle:
    response_complete = False


class FakeProtocol:
    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.cycle: FakeCycle | None = None
        self.buffered_bytes = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    return now


def open_connections(count: int = 1, max_open: int = 100) -> tuple[Connections, list[Any]]:
    """Connections with a time limit of 10 s for waiting and of 60 s for an answer."""
    watcher = Connections(replace(SETTINGS, body_timeout=10.0), max_open)
    protocols = [FakeProtocol() for _ in range(count)]
    for protocol in protocols:
        watcher.opened(protocol)
    return watcher, protocols


def test_incomplete_headers_get_a_408(clock: list[float]) -> None:
    watcher, (silent, slow, busy) = open_connections(3)
    slow.buffered_bytes = 5
    busy.cycle = FakeCycle()
    clock[0] += 9
    watcher.sweep()
    assert not silent.transport.closing and not slow.transport.closing
    clock[0] += 2
    watcher.sweep()
    assert silent.transport.closing and silent.transport.written == b""
    assert slow.transport.closing and slow.transport.written.startswith(b"HTTP/1.1 408 Request")
    assert not busy.transport.closing


def test_the_time_counts_from_the_last_response(clock: list[float]) -> None:
    watcher, (protocol,) = open_connections()
    protocol.cycle = FakeCycle()
    clock[0] += 100
    watcher.sweep()
    protocol.cycle.response_complete = True
    watcher.responded(protocol)
    clock[0] += 9
    watcher.sweep()
    assert not protocol.transport.closing
    clock[0] += 2
    watcher.sweep()
    assert protocol.transport.closing


def test_a_client_that_does_not_read_is_aborted(clock: list[float]) -> None:
    watcher, (stalled, slow) = open_connections(2)
    for protocol in (stalled, slow):
        protocol.cycle = FakeCycle()
        protocol.transport.unsent = 1000
    for _ in range(20):
        watcher.sweep()
        clock[0] += 1
        slow.transport.unsent -= 1
    assert stalled.transport.aborted and not slow.transport.aborted


def test_a_closing_connection_is_eventually_aborted(clock: list[float]) -> None:
    """`close` waits until the client has read everything, so slow reading must have a limit."""
    watcher, (slow,) = open_connections()
    slow.transport.closing = True
    slow.transport.unsent = 1000
    for _ in range(70):
        watcher.sweep()
        clock[0] += 1
        slow.transport.unsent -= 1
    assert slow.transport.aborted


def test_the_longest_idle_connection_is_closed_at_the_limit() -> None:
    watcher, protocols = open_connections(3, max_open=3)
    protocols[0].cycle = FakeCycle()  # in progress
    newest = FakeProtocol()
    watcher.opened(newest)
    assert protocols[1].transport.aborted and not protocols[2].transport.aborted
    watcher.responded(protocols[2])
    assert len(watcher.states) == 3
    for protocol in (protocols[2], newest):
        protocol.cycle = FakeCycle()
    refused = FakeProtocol()
    watcher.opened(refused)
    assert refused.transport.written.startswith(b"HTTP/1.1 503 ") and refused.transport.closing
    assert not any(protocol.transport.aborted for protocol in (protocols[0], protocols[2], newest))


def test_the_descriptor_limit_is_raised() -> None:
    """Runs in a separate process, because a lowered limit would remain in effect."""
    code = (
        "import resource; from peagle.server.http.connections import raise_descriptor_limit as r;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard));"
        "print(r(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    words = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    limit, soft, hard = map(int, words)
    assert limit == soft == min(hard, 1 << 16) if hard > 0 else soft == 1 << 16


def test_connections_leave_descriptors_for_other_files() -> None:
    assert connection_limit(SETTINGS, 1024) == 1024 - 256
    assert (
        connection_limit(replace(SETTINGS, method=None, kv_tokens=None, engine="vllm"), 1024)
        == (1024 - 256) // 2
    )
    assert connection_limit(SETTINGS, 100) == 16
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert raise_descriptor_limit() >= min(soft, 1 << 16)


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    data = b""
    try:
        while chunk := connection.recv(1 << 16):
            data += chunk
    except ConnectionError:
        pass
    connection.close()
    return data


@pytest.mark.parametrize("http", ["httptools", pytest.param("h11", marks=pytest.mark.slow)])
def test_slow_headers_on_a_socket(http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if http == "h11":
        monkeypatch.setattr("peagle.server.http.header_limit.find_spec", lambda name: None)
    with running(make_backend()) as (server, url):
        silent = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
        again = raw_request(url, "GET /health HTTP/1.1\nhost: 127.0.0.1\nx-a: a")
        assert read_reply(again)[0] == 200
        slow = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
        for piece in INCOMPLETE:
            slow.sendall(piece)
            again.sendall(piece)
            time.sleep(0.05)
        wait_for(lambda: incomplete_requests(server) >= 2)
        server.connections.wait_seconds = 0.5
        reply = read_all(slow)
        assert reply.startswith(b"HTTP/1.1 408 ") or (http == "h11" and reply == b"")
        read_all(again)
        assert read_all(silent) == b""


def incomplete_requests(server: Server) -> int:
    """Count connections that have sent all of INCOMPLETE; every connection counts with h11."""
    size = sum(map(len, INCOMPLETE))
    protocols = list(server.connections.states)
    return sum(getattr(protocol, "buffered_bytes", size) == size for protocol in protocols)


def test_idle_connections_do_not_block_other_clients() -> None:
    with running(make_backend()) as (server, url):
        server.connections.max_open = 20
        port = int(url.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(60)]
        for _ in range(5):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.post(f"{url}{TEXT}", json=LONG, timeout=60).status_code == 200
        assert len(server.connections.states) <= 20
        assert read_all(idle[0]) == b""
        for connection in idle[1:]:
            connection.close()


def unread_request(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a connection with a small receive buffer, without reading the answer."""
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    head = (HEAD + f"content-length: {len(content)}").replace("\n", "\r\n").encode()
    connection.sendall(head + b"\r\n\r\n" + content)
    return connection


def shrink_send_buffers(server: Server) -> None:
    """Limit the unread bytes that the kernel buffers for a client."""
    listener = server.servers[0].sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_clients_that_never_read_are_disconnected(stream: bool) -> None:
    """This includes clients with a complete answer: closing a connection waits for unsent data."""
    front = make_backend()
    with running(front) as (server, url):
        shrink_send_buffers(server)
        stalled = unread_request(url, LONG | {"n": 4, "logprobs": 20, "stream": stream})
        states = server.connections.states
        wait_for(lambda: any(state.unsent_bytes for state in list(states.values())))
        server.connections.wait_seconds = 0.5
        wait_for(lambda: not server.connections.states and all_idle(front))
        assert httpx.post(f"{url}{TEXT}", json=LONG, timeout=60).status_code == 200
        stalled.close()


def test_an_unread_stream_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MAX_UNREAD_PIECES", 50)
    monkeypatch.setattr(answer, "MAX_UNREAD_PIECES_PER_CHOICE", 1)
    front = make_backend()
    with running(front) as (server, url):
        shrink_send_buffers(server)
        stalled = unread_request(url, LONG | {"n": 4, "logprobs": 20, "stream": True})
        wait_for(lambda: front.drain.in_flight)
        wait_for(lambda: all_idle(front))
        assert front.engines.status()["p-eagle"]["finished"]["abort"] == 4
        stalled.close()


@pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="TCP_INFO is not supported by this system"
)
def test_bytes_read_by_a_slow_client_count_as_progress(clock: list[float]) -> None:
    """The client may read from the kernel's buffer while the buffer of the server stays full."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:

        class Transport(FakeTransport):
            def get_extra_info(self, name: str) -> Any:
                return server

        protocol = FakeProtocol()
        protocol.transport = Transport()
        assert delivered_bytes(protocol) == 0
        protocol.cycle = FakeCycle()
        protocol.transport.unsent = 500
        swept = Connections(replace(SETTINGS, body_timeout=10.0), 16)
        swept.opened(protocol)
        for delivered in (1000, 2000, 3000, 4000):
            swept.sweep()
            server.sendall(b"x" * 1000)
            client.recv(1000)
            # The client acknowledges the bytes later.
            wait_for(lambda count=delivered: delivered_bytes(protocol) == count)
            clock[0] += 8
        swept.sweep()
        assert not protocol.transport.aborted
        clock[0] += 11
        swept.sweep()
        assert protocol.transport.aborted

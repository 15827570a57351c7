"""Web servers that share a socket balance a burst of connections."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from peagle.server.http_workers import shared_listener
from peagle.server.http_workers.front_server import FrontServer
from peagle.server.http_workers.shared_listener import SharedListener
from peagle.server.listener import listen
from peagle.server.web_server import Server

BURST = 48


class Recorder(asyncio.Protocol):
    def __init__(self, connections: list[asyncio.Transport]) -> None:
        self.connections = connections

    def connection_made(self, transport: Any) -> None:
        self.connections.append(transport)


def share(listener: socket.socket, connections: list[asyncio.Transport]) -> SharedListener:
    return SharedListener(listener, lambda: Recorder(connections), connections)


async def connect(address: tuple[str, int], count: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    clients = [socket.socket() for _ in range(count)]
    for client in clients:
        client.setblocking(False)
        await loop.sock_connect(client, address)
    return clients


async def wait_for_connections(*lists: list[asyncio.Transport], count: int) -> None:
    async with asyncio.timeout(60):
        while sum(map(len, lists)) < count:
            await asyncio.sleep(0.005)


async def close_all(clients: list[socket.socket], connections: list[asyncio.Transport]) -> None:
    for client in clients:
        client.close()
    for connection in connections:
        connection.close()
    await asyncio.sleep(0)


async def burst(address: tuple[str, int], listener: socket.socket) -> None:
    busy: list[asyncio.Transport] = []
    idle: list[asyncio.Transport] = []
    first = SharedListener(listener, lambda: Recorder(busy), range(1000))
    other_listener = listener.dup()  # An event loop can watch a descriptor only once.
    second = share(other_listener, idle)
    clients = await connect(address, BURST)
    await wait_for_connections(busy, idle, count=BURST)
    assert len(idle) > 0.8 * BURST, "the server with many connections takes few new ones"
    second.close()
    clients += await connect(address, 1)
    await wait_for_connections(busy, idle, count=BURST + 1)
    first.close()
    other_listener.close()
    await close_all(clients, busy + idle)


def test_a_burst_goes_to_servers_with_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pauses are long enough for a busy machine.
    monkeypatch.setattr(shared_listener, "PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(shared_listener, "MAX_PAUSE_SECONDS", 2.0)
    listener = listen("127.0.0.1", 0)
    asyncio.run(burst(listener.getsockname()[:2], listener))
    listener.close()


@pytest.mark.parametrize(
    ("error", "retry_seconds"),
    [
        (OSError(errno.EMFILE, "too many open files"), 0.01),
        (ConnectionAbortedError(errno.ECONNABORTED, "the client has gone"), 3600.0),
    ],
)
def test_accepting_continues_after_an_error(
    monkeypatch: pytest.MonkeyPatch, error: OSError, retry_seconds: float
) -> None:
    monkeypatch.setattr(shared_listener, "RETRY_SECONDS", retry_seconds)
    listener = listen("127.0.0.1", 0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept
        failures = [error] * 2

        async def failing(sock: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", failing)
        connections: list[asyncio.Transport] = []
        shared = share(listener, connections)
        clients = await connect(listener.getsockname()[:2], 1)
        await wait_for_connections(connections, count=1)
        assert not failures
        shared.close()
        await close_all(clients, connections)

    asyncio.run(run())
    listener.close()


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "invalid"), RuntimeError("a bug")])
def test_a_failing_connection_is_closed_and_the_next_one_accepted(error: Exception) -> None:
    listener = listen("127.0.0.1", 0)

    async def run() -> None:
        connections: list[asyncio.Transport] = []
        failures = [error]

        def create_protocol() -> asyncio.Protocol:
            if failures:
                raise failures.pop()
            return Recorder(connections)

        shared = SharedListener(listener, create_protocol, connections)
        clients = await connect(listener.getsockname()[:2], 2)
        await wait_for_connections(connections, count=1)
        async with asyncio.timeout(60):
            assert await asyncio.get_running_loop().sock_recv(clients[0], 1) == b""
        shared.close()
        await close_all(clients, connections)

    asyncio.run(run())
    listener.close()


class FailedServer(FrontServer):
    """A server whose start fails: old versions of uvicorn return in this case, new ones exit."""

    def __init__(self) -> None:
        self.started = False
        self.listeners = []


def test_a_server_that_fails_to_start_accepts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def startup(self: Server, sockets: list[socket.socket] | None = None) -> None:
        assert sockets == []

    monkeypatch.setattr(Server, "startup", startup)
    listener = listen("127.0.0.1", 0)
    server = FailedServer()
    asyncio.run(server.startup([listener]))
    assert server.listeners == []
    listener.close()

"""Web servers that share a socket take equal parts of a burst of connections."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from peagle.server import shared_listener
from peagle.server.listener import listen
from peagle.server.shared_listener import SharedListener

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
    async with asyncio.timeout(10):
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
    first = share(listener, busy)
    clients = await connect(address, BURST)
    await wait_for_connections(busy, count=BURST)
    other_listener = listener.dup()  # A loop watches a descriptor once.
    second = share(other_listener, idle)
    clients += await connect(address, BURST)
    await wait_for_connections(busy, idle, count=2 * BURST)
    assert len(idle) > 0.6 * BURST, "the one with fewer connections takes most of the new ones"
    second.close()
    clients += await connect(address, 1)
    await wait_for_connections(busy, idle, count=2 * BURST + 1)
    assert len(idle) + len(busy) == 2 * BURST + 1
    first.close()
    other_listener.close()
    await close_all(clients, busy + idle)


def test_a_burst_is_shared() -> None:
    listener = listen("127.0.0.1", 0)
    asyncio.run(burst(listener.getsockname()[:2], listener))
    listener.close()


def test_accepting_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_listener, "RETRY_SECONDS", 0.01)
    listener = listen("127.0.0.1", 0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept
        failures = [OSError(errno.EMFILE, "too many open files")] * 2

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

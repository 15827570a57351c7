"""SharedListener: one web server's part in a listening socket that several of them share.

An event loop accepts all connections that wait. In a burst, the web server that wakes up first
would take most of them, and its requests would wait for each other. Here a web server accepts one
at a time, and pauses the longer, the more connections it has: the others take the next ones.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection

from peagle.server.http.logs import log_event

# For each open connection, after one is accepted; and at most.
PAUSE_SECONDS = 0.0001
MAX_PAUSE_SECONDS = 0.001
# Without free descriptors or memory, connections wait in the socket for so long.
RETRY_SECONDS = 1.0


class SharedListener:
    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.Protocol],
        open_connections: Collection[object],
    ) -> None:
        """Accept from now on; in a running event loop. `open_connections`: of this web server."""
        listener.setblocking(False)
        self._open_connections = open_connections
        self._listener = listener
        self._create_protocol = create_protocol
        self._task = asyncio.create_task(self._accept_all())

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        self._task.cancel()

    async def _accept_all(self) -> None:
        while True:
            try:
                await self._accept()
            except ConnectionError:  # The client has gone.
                continue
            except OSError as error:
                log_event("accept failed", logging.WARNING, reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._listener)
        try:
            await loop.connect_accepted_socket(self._create_protocol, connection)
        except Exception as error:  # Other clients wait.
            connection.close()
            log_event("connection failed", logging.WARNING, reason=str(error))
        pause = PAUSE_SECONDS * len(self._open_connections)
        await asyncio.sleep(min(pause, MAX_PAUSE_SECONDS))

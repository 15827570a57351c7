"""ConnectionPool: the engine processes of a server, and which of them gets a request."""

import asyncio
from collections.abc import Callable

from peagle.server.front.engine_connection import EngineConnection
from peagle.server.front.front_request import FrontRequest
from peagle.server.http.errors import ApiError
from peagle.server.messages import ServerState, TargetInfo


class ConnectionPool:
    def __init__(self, on_target: Callable[[TargetInfo], None]) -> None:
        """`on_target`: see EngineConnection."""
        self.connections: dict[str, EngineConnection] = {}
        self._on_target = on_target
        self._waiting: dict[int, FrontRequest] = {}  # For a process that is ready.
        # The same for those that arrived while there was none: how many requests each stands for.
        self._arrivals: dict[asyncio.Future[None], int] = {}

    def update(self, state: ServerState) -> None:
        """Follow the supervisor: connect to new processes, send lost requests to another."""
        for engine in state.engines:
            connection = self.connections.get(engine.name)
            if connection is None:
                connection = EngineConnection(engine.name, self._on_target)
                self.connections[engine.name] = connection
            for request in connection.update(engine):
                self._waiting[request.add.id] = request
        self.send_waiting()

    def least_loaded(self) -> EngineConnection | None:
        """The ready process with the fewest requests; among equal ones the first."""
        ready = [connection for connection in self.connections.values() if connection.ready]
        return min(ready, key=lambda connection: connection.load, default=None)

    @property
    def waiting(self) -> int:
        """Requests that wait for a process: given back by one that ended, or arrived since."""
        return len(self._waiting) + sum(self._arrivals.values())

    async def wait(self, requests: int, seconds: float) -> None:
        """Wait with so many requests until `wake_arrivals` is called, but not for longer."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals[waiter] = requests
        try:
            await asyncio.wait({waiter}, timeout=seconds)
        finally:
            self._arrivals.pop(waiter, None)

    def wake_arrivals(self) -> None:
        """A process is ready, or none will be: first come, first served."""
        for waiter in self._arrivals:
            if not waiter.done():
                waiter.set_result(None)

    def send_waiting(self) -> None:
        connection = self.least_loaded()
        while self._waiting and connection is not None:
            request_id = next(iter(self._waiting))
            connection.send(self._waiting.pop(request_id))
            connection = self.least_loaded()

    def abort(self, request_id: int) -> None:
        if self._waiting.pop(request_id, None) is None:
            any(connection.abort(request_id) for connection in self.connections.values())

    def refuse_pending(self, error: ApiError) -> None:
        """Refuse what no process has accepted yet."""
        for connection in self.connections.values():
            connection.refuse_pending(error)
        for request in list(self._waiting.values()):
            if not request.accepted.done():
                del self._waiting[request.add.id]
                request.refuse(error)

    def refuse_all(self, error: ApiError) -> None:
        """Disconnect from all processes. No request is sent again."""
        for connection in self.connections.values():
            if connection.link is not None:
                for request in connection.disconnect():
                    self._waiting[request.add.id] = request
        for request in self._waiting.values():
            request.refuse(error)
        self._waiting.clear()

    def close(self) -> None:
        for connection in self.connections.values():
            if connection.link is not None:
                connection.link.close()

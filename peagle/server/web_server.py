"""The web server: uvicorn, and signals that start a drain."""

import asyncio
import socket
from types import FrameType

import uvicorn

from peagle.errors import UserError
from peagle.server.http.app import build_app
from peagle.server.http.backend import Backend
from peagle.server.http.connections import Connections, connection_limit, raise_descriptor_limit
from peagle.server.http.drain import SECOND_SIGNAL
from peagle.server.http.header_limit import server_protocol
from peagle.server.http.logs import log_event
from peagle.server.listener import LISTEN_BACKLOG

KEEP_ALIVE_SECONDS = 30
SWEEP_TICKS = 5  # of a tenth of a second, between two checks of all connections
SHUTDOWN_SECONDS = 3  # for connections that are open after the drain


class Server(uvicorn.Server):
    def __init__(self, backend: Backend) -> None:
        descriptors = raise_descriptor_limit()
        max_open = connection_limit(backend.settings, descriptors)
        self.connections = Connections(backend.settings, max_open)
        super().__init__(
            uvicorn.Config(
                build_app(backend, self.fail),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                backlog=LISTEN_BACKLOG,
                lifespan="on",
                http=server_protocol(self.connections),
                ws="none",
            )
        )
        self.backend = backend
        self.failure: str | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self.connections.sweep()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a drain at the first signal; abort all requests at the second.

        uvicorn's `force_exit` is not used: without the end of its lifespan it logs tracebacks.
        """
        drain = self.backend.drain
        if self.loop is None:
            self.should_exit = True
            return
        if drain.is_draining:
            drain.cut_short()
            return
        log_event(
            "draining",
            signal=sig,
            seconds=drain.seconds,
            open=drain.open_requests,
            second_signal=SECOND_SIGNAL,
        )
        self.loop.call_soon_threadsafe(drain.begin, self.stop)

    def stop(self) -> None:
        log_event("stopped")
        self.should_exit = True

    def fail(self, reason: str) -> None:
        """Exit because the model can never be served. This may be called from any thread."""
        self.failure = reason
        self.should_exit = True


def run_server(backend: Backend, listener: socket.socket) -> None:
    """Run until a signal stops it. UserError: the model cannot be served."""
    server = Server(backend)
    server.run(sockets=[listener])
    if server.failure is not None:
        raise UserError(server.failure)

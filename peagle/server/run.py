"""The server process: listening socket, web server, and signals that start a drain."""

import asyncio
import logging
import os
import socket
import sys
from types import FrameType

import uvicorn

from peagle.errors import UserError
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.app import build_app
from peagle.server.http.backend import Backend
from peagle.server.http.connections import Connections, connection_limit, raise_descriptor_limit
from peagle.server.http.header_limit import server_protocol
from peagle.server.http.logs import log_event, set_up_logging
from peagle.server.openai.routes import create_local_backend
from peagle.server.settings import ServerSettings
from peagle.server.workers.gateway import Gateway
from peagle.server.workers.replicas import ReplicaKind
from peagle.server.workers.vllm_worker import VllmKind

LISTEN_BACKLOG = 2048  # connections
KEEP_ALIVE_SECONDS = 30
DEVICE_LOST_EXIT_CODE = 3  # another attempt may succeed, in a new process
SWEEP_TICKS = 5  # of a tenth of a second, between two checks of all connections
SHUTDOWN_SECONDS = 3  # for connections that are open after the drain


def listen(host: str, port: int) -> socket.socket:
    """Open a TCP socket. It accepts connections at once; they wait until the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}): use another `port` or `host`"
        ) from error
    listener.listen(LISTEN_BACKLOG)
    listener.set_inheritable(True)
    return listener


def listen_unix(path: str) -> socket.socket:
    """Open a Unix socket: the permissions of the file decide who can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(LISTEN_BACKLOG)
    return listener


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
        """Start a drain at the first signal; exit at once at the second."""
        drain = self.backend.drain
        if self.loop is None or drain.is_draining:
            self.should_exit = True
            self.force_exit = True
            return
        log_event("draining", signal=sig, seconds=drain.seconds, open=drain.open_requests)
        self.loop.call_soon_threadsafe(drain.begin, self.stop)

    def stop(self) -> None:
        log_event("stopped")
        self.should_exit = True

    def fail(self, reason: str) -> None:
        """Exit because the model can never be served. This may be called from any thread."""
        self.failure = reason
        self.should_exit = True


def serve(settings: ServerSettings) -> None:
    """Run a server until it is stopped by a signal. UserError: the model cannot be served."""
    set_up_logging()
    listener = open_listener(settings)
    backend = create_backend(settings)
    server = Server(backend)
    server.run(sockets=[listener])
    if isinstance(backend, LocalBackend) and backend.engines.device_lost:
        # Without destructors, which would use the device.
        sys.stderr.flush()
        os._exit(DEVICE_LOST_EXIT_CODE)
    if server.failure is not None:
        raise UserError(server.failure)
    if isinstance(backend, LocalBackend) and backend.engines.threads_alive:
        # A thread loads a model, builds an engine or runs a long pass: do not wait for it.
        sys.stderr.flush()
        os._exit(0)


def open_listener(settings: ServerSettings) -> socket.socket:
    if settings.socket:
        return listen_unix(settings.socket)
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    log_event("listening", host=host, port=port, model=settings.model_names[0])
    if settings.is_open_to_network:
        log_event(
            "other machines can use this server without a key: set an API key, or listen on"
            " 127.0.0.1",
            logging.WARNING,
        )
    return listener


def create_backend(settings: ServerSettings) -> Backend:
    if settings.engine == "vllm":
        return Gateway(settings, VllmKind(settings))
    if settings.replicas:
        return Gateway(settings, ReplicaKind(settings))
    return create_local_backend(settings)

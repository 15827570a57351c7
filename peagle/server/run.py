"""The process: a socket that accepts at once, a web server behind it, signals that begin a drain."""

import asyncio
import logging
import os
import socket
import sys
from types import FrameType

import uvicorn

from peagle.errors import UserError
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.app import build
from peagle.server.http.backend import Backend
from peagle.server.http.header_limit import limited_protocol
from peagle.server.http.logs import log_event, set_up
from peagle.server.openai.routes import create_local_backend
from peagle.server.settings import ServerSettings
from peagle.server.workers.gateway import Gateway
from peagle.server.workers.replicas import Replicas
from peagle.server.workers.vllm_worker import Vllm

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Connections are accepted from now on; whoever connects waits for the rest of us."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    here = socket.socket(family, socket.SOCK_STREAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        here.bind((host, port))
    except OSError as error:
        here.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}): use another --port or --host"
        ) from error
    here.listen(BACKLOG)
    here.set_inheritable(True)
    return here


def listen_at(path: str) -> socket.socket:
    """A Unix socket: only who may open the file can connect."""
    here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here.bind(path)
    here.listen(BACKLOG)
    return here


class Server(uvicorn.Server):
    def __init__(self, front: Backend) -> None:
        super().__init__(
            uvicorn.Config(
                build(front, self.fail),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=3,
                backlog=BACKLOG,
                lifespan="on",
                http=limited_protocol(),
            )
        )
        self.front, self.failure = front, None  # type: Backend, str | None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second does not wait."""
        if self.loop is None or self.front.drain.begun:
            self.should_exit = self.force_exit = True
            return
        log_event(
            "draining",
            signal=sig,
            seconds=self.front.settings.drain_seconds,
            open=self.front.drain.open,
        )
        self.loop.call_soon_threadsafe(self.front.drain.begin, self.stop)

    def stop(self) -> None:
        log_event("stopped")
        self.should_exit = True

    def fail(self, reason: str) -> None:
        """What was asked for cannot be served: from any thread."""
        self.failure = reason
        self.should_exit = True


def serve(settings: ServerSettings) -> None:
    set_up()
    here = listen_at(settings.socket) if settings.socket else listen(settings.host, settings.port)
    if settings.socket is None:
        host, port = here.getsockname()[:2]
        log_event("listening", host=host, port=port, model=settings.model_names[0])
        if settings.open_to_all:
            log_event(
                "anybody who reaches this address can use it: set --api-key, or --host 127.0.0.1",
                logging.WARNING,
            )
    front = front_for(settings)
    server = Server(front)
    server.run(sockets=[here])
    if server.failure is not None:
        raise UserError(server.failure)
    if (
        isinstance(front, LocalBackend) and front.engines.driver.alive
    ):  # loading, or in a long pass: nobody waits for that
        sys.stderr.flush()
        os._exit(0)


def front_for(settings: ServerSettings) -> Backend:
    if settings.engine == "vllm":
        return Gateway(settings, Vllm(settings))
    if settings.replicas:
        return Gateway(settings, Replicas(settings))
    return create_local_backend(settings)

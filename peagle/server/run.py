"""`peagle serve`: opens the socket, and runs the web server, or several that share the engines."""

import asyncio
import logging
import socket

from peagle.errors import UserError
from peagle.server.engine_process.engine_set import EngineSet
from peagle.server.front.engine_client import EngineClient
from peagle.server.http.backend import Backend
from peagle.server.http.logs import log_event, set_up_logging
from peagle.server.http_workers.front_set import FrontSet
from peagle.server.routes import create_engine_backend
from peagle.server.settings import ServerSettings
from peagle.server.vllm.gateway import Gateway
from peagle.server.web_server import Server, listen


def serve(settings: ServerSettings) -> None:
    """Run a server until it is stopped by a signal. UserError: the model cannot be served."""
    set_up_logging()
    listener = open_listener(settings)
    if settings.http_workers > 1:
        asyncio.run(FrontSet(settings, listener).run())
        return
    server = Server(create_backend(settings))
    server.run(sockets=[listener])
    if server.failure is not None:
        raise UserError(server.failure)


def open_listener(settings: ServerSettings) -> socket.socket:
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
        return Gateway(settings)
    return create_engine_backend(settings, EngineClient(settings, EngineSet(settings)))

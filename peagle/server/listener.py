"""The listening socket of a server. It imports no web framework: it is opened first of all."""

import logging
import socket

from peagle.errors import UserError
from peagle.server.http.logs import log_event
from peagle.server.settings import ServerSettings

LISTEN_BACKLOG = 2048  # connections


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

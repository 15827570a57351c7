"""A web server on a thread. Nothing here imports torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from peagle.server.http.backend import Backend
from peagle.server.listener import listen
from peagle.server.web_server import Server


@contextmanager
def on_a_thread(backend: Backend) -> Iterator[tuple[Server, str]]:
    """A server on a thread, and its address. The server is stopped at the end."""
    listener = listen("127.0.0.1", 0)
    server = Server(backend)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=40)
        listener.close()
        assert not thread.is_alive(), "the server does not stop"

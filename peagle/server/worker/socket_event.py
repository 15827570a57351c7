"""SocketEvent: an event that is also set by a message, so that one thread can wait for both."""

import os
import threading
from contextlib import suppress

import zmq


class SocketEvent(threading.Event):
    """Has the methods that a Driver uses; `wait` also returns for a message."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        super().__init__()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._read, zmq.POLLIN)

    def set(self) -> None:
        with suppress(BlockingIOError):  # The pipe is full: the event is set.
            os.write(self._write, b"x")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._poller.poll(None if timeout is None else int(timeout * 1000)))

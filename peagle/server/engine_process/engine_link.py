"""EngineLink: the front's end of the socket to the engine's process, on the event loop.

What one turn of the loop sends goes into one message.
"""

import asyncio
from collections.abc import Callable

import zmq

from peagle.server import messages
from peagle.server.messages import FrontBatch, WorkerBatch

HEARTBEAT_SECONDS = 1.0
# Messages that one turn of the loop reads. An engine may send them faster than they are handled,
# and what they hold must be sent on to clients meanwhile.
MAX_READS = 8


class EngineLink:
    def __init__(
        self, address: str, on_batch: Callable[[WorkerBatch], None], identity: bytes = b""
    ) -> None:
        """`identity` of the socket; b"": ZeroMQ makes one."""
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._batch = FrontBatch()
        self._scheduled = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._descriptor: int = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._read)
        self._timer = self._loop.call_soon(self._beat)

    def batch(self) -> FrontBatch:
        """The message that this turn of the loop sends; add to it."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return self._batch

    def close(self) -> None:
        if not self._socket.closed:
            self._timer.cancel()
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _beat(self) -> None:
        """Say that the front is alive, and look for messages whose signal was missed."""
        self.batch()
        self._timer = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    def _flush(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        batch = self._batch
        self._batch = FrontBatch()
        self._socket.send(messages.encode(batch), zmq.NOBLOCK)
        self._read()  # Sending may consume the signal that a message has arrived.

    def _read(self) -> None:
        for _ in range(MAX_READS):
            if self._socket.closed:
                return
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_batch(messages.decode_worker(payload))
        self._loop.call_soon(self._read)

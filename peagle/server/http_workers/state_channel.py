"""The supervisor tells all fronts which engine processes run: publisher and subscription."""

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from peagle.server import messages
from peagle.server.messages import ServerState

REPEAT_SECONDS = 0.5  # For fronts that have just begun to listen.


class StatePublisher:
    def __init__(self, address: str, state: Callable[[], ServerState]) -> None:
        """`state` is called for what is published."""
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._timer = self._loop.call_soon(self._repeat)

    def publish(self) -> None:
        if not self._socket.closed:
            self._socket.send(messages.encode(self._state()), zmq.NOBLOCK)

    def close(self) -> None:
        self._timer.cancel()
        self._socket.close()

    def _repeat(self) -> None:
        self.publish()
        self._timer = self._loop.call_later(REPEAT_SECONDS, self._repeat)


class StateSubscription:
    """The StateSource of a front."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._task: asyncio.Task[None] | None = None

    def start(
        self, on_state: Callable[[ServerState], None], on_failure: Callable[[str], None]
    ) -> None:
        """The supervisor ends all fronts if the model can never be served."""
        self._task = asyncio.get_running_loop().create_task(self._read(on_state))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, on_state: Callable[[ServerState], None]) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self.address)
        try:
            while True:
                on_state(messages.decode_state(await socket.recv()))
        finally:
            socket.close(0)

"""One sign to the event loop for all the pieces of a step, not one for each: two threads would fight over every one."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Listener = Callable[[], None]


class LoopWakeup:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung: deque[Listener] = deque()
        self._under_way = False  # the loop will look
        self._held = False

    def listen(self) -> None:
        """From the event loop whose listeners are called."""
        self._loop = asyncio.get_running_loop()

    def ring(self, listener: Listener) -> None:
        """From any thread: the loop calls `listener`, soon."""
        self._rung.append(listener)
        if not self._held:
            self._call()

    def hold(self) -> None:
        """Until `release`, rings are collected."""
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._rung:
            self._call()

    def _call(self) -> None:
        if not self._under_way and self._loop is not None:
            self._under_way = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._under_way = False  # before looking: who rings now is heard, here or in the next call
        while self._rung:
            self._rung.popleft()()

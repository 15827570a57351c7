"""LoopWakeup: wake the event loop once per engine step instead of once per piece of an answer.

Every wakeup makes the event loop's thread compete with the engine's thread for the interpreter.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Listener = Callable[[], None]


class LoopWakeup:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notified: deque[Listener] = deque()
        self._scheduled = False  # The loop will run `_run_listeners`.
        self._on_hold = False

    def attach_loop(self) -> None:
        """Use the running event loop from now on; listeners are called there."""
        self._loop = asyncio.get_running_loop()

    def notify(self, listener: Listener) -> None:
        """Have the event loop call `listener` soon. Any thread may call this."""
        self._notified.append(listener)
        if not self._on_hold:
            self._schedule()

    def hold(self) -> None:
        """Collect notifications until `release`."""
        self._on_hold = True

    def release(self) -> None:
        self._on_hold = False
        if self._notified:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            with suppress(RuntimeError):  # The loop is closed: there are no listeners any more.
                self._loop.call_soon_threadsafe(self._run_listeners)

    def _run_listeners(self) -> None:
        # Cleared first: a notification that arrives now is handled here or in the next call.
        self._scheduled = False
        while self._notified:
            self._notified.popleft()()

"""RestartTimer: when a failed engine is built again."""

import threading
import time
from collections.abc import Callable

from peagle.server.backoff import Backoff

MAX_FAILURES = 5  # Failures in a row after which restarting is given up.


class RestartTimer:
    """Waits longer after each failed restart, and little after an engine that ran for long."""

    def __init__(self, first_wait: float) -> None:
        self._backoff = Backoff(first_wait)
        self._ready_since: float | None = None
        self._timer: threading.Timer | None = None
        # Failed restarts, and engines that died before they answered a request, in a row.
        self.failures = 0

    def engine_ready(self) -> None:
        self._ready_since = time.monotonic()

    @property
    def exhausted(self) -> bool:
        return self.failures >= MAX_FAILURES

    def engine_died(self, answered: bool) -> None:
        self.failures = 0 if answered else self.failures + 1

    def restart_failed(self) -> None:
        self.failures += 1

    def schedule(self, restart: Callable[[], object]) -> float:
        """Call `restart` on a timer thread. Returns the seconds until then."""
        now = time.monotonic()
        lifetime = 0.0 if self._ready_since is None else now - self._ready_since
        self._ready_since = None
        wait = self._backoff.next(lifetime)
        self._timer = threading.Timer(wait, restart)
        self._timer.daemon = True
        self._timer.start()
        return wait

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

"""StepLock: one step at a time, and whoever waits for the lock gets it between two steps."""

import threading


class StepLock:
    """A lock that a thread which takes it again and again cannot keep from others.

    A plain lock is often taken again by the thread that released it, before a waiting thread wakes
    up: an engine's thread would run step after step until no request is left. Here a thread that
    waits for the lock holds the turnstile, at which the next step waits.
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

"""Exponential backoff between restarts; it starts over after a long healthy run."""

MAX_BACKOFF_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # a run longer than this resets the backoff


class Backoff:
    def __init__(self, first: float) -> None:
        self.first = first
        self.wait = first

    def next(self, lived: float) -> float:
        """Return the seconds to wait after a run of `lived` seconds."""
        wait = self.first if lived > HEALTHY_SECONDS else self.wait
        self.wait = min(2 * wait, MAX_BACKOFF_SECONDS)
        return wait

"""How long to wait before what died is started again: twice as long each time, but short after a healthy life."""

LONGEST, HEALTHY = (
    30.0,
    60.0,
)  # seconds: between two tries; of a life that is forgotten when it ends


class Backoff:
    def __init__(self, first: float) -> None:
        self.first = self.wait = first

    def next(self, lived: float) -> float:
        """Seconds to wait now, after a life of so many."""
        wait = self.first if lived > HEALTHY else self.wait
        self.wait = min(2 * wait, LONGEST)
        return wait

"""FairQueue: the waiting requests, bounded in number, with users taking turns.

Requests of one user are first come, first served:

    pushed   a1 a2 a3 b1 c1 c2
    popped   a1 b1 c1 a2 c2 a3

A preempted request goes to the very front, because it has waited already.
"""

from collections import deque
from collections.abc import Iterator

from peagle.engine.schedule.request import Request
from peagle.errors import UserError


class QueueFull(UserError):
    """The request can be sent again later: a server answers 429 or 503."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} requests are already waiting: try again later, or raise `max_queue`"
        )


class FairQueue:
    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
        self.front: deque[Request] = deque()
        # Queues by user, never empty; the first user's turn is next.
        self.user_queues: dict[str, deque[Request]] = {}

    def __len__(self) -> int:
        return len(self.front) + sum(map(len, self.user_queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting requests, in no particular order."""
        yield from self.front
        for queue in self.user_queues.values():
            yield from queue

    def push(self, request: Request) -> None:
        if len(self) >= self.limit:
            raise QueueFull(self.limit)
        self.user_queues.setdefault(request.user, deque()).append(request)

    def push_front(self, request: Request) -> None:
        """Put a preempted request back; the limit does not apply, as it was admitted before."""
        self.front.appendleft(request)

    def peek(self) -> Request | None:
        """Return the request that `pop` would return, or None."""
        if self.front:
            return self.front[0]
        return next((queue[0] for queue in self.user_queues.values()), None)

    def pop(self) -> Request:
        if self.front:
            return self.front.popleft()
        user = next(iter(self.user_queues))
        queue = self.user_queues.pop(user)
        request = queue.popleft()
        if queue:
            self.user_queues[user] = queue  # Behind the other users.
        return request

    def remove(self, id: str) -> Request | None:
        """Remove and return the request with this id; None if it is not waiting."""
        request = next((request for request in self if request.id == id), None)
        if request is None:
            return None
        if request in self.front:
            self.front.remove(request)
        else:
            queue = self.user_queues[request.user]
            queue.remove(request)
            if not queue:
                del self.user_queues[request.user]
        return request

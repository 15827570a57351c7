"""The queue of requests that wait: bounded and fair.

Users take turns; within a user, first come, first served:

    pushed   a1 a2 a3 b1 c1 c2
    popped   a1 b1 c1 a2 c2 a3

A request that was preempted goes before everybody: it has waited already.
"""

from collections import deque
from collections.abc import Iterator

from peagle.engine.schedule.request import Request
from peagle.errors import UserError


class QueueFull(UserError):
    """Try again later: a server answers 429 or 503."""


class FairQueue:
    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
        self.front: deque[Request] = deque()
        self.lanes: dict[
            str, deque[Request]
        ] = {}  # by user, never empty; the first lane's turn is next

    def __len__(self) -> int:
        return len(self.front) + sum(map(len, self.lanes.values()))

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no promised order."""
        yield from self.front
        for lane in self.lanes.values():
            yield from lane

    def push(self, request: Request) -> None:
        if len(self) >= self.limit:
            raise QueueFull(
                f"{self.limit} requests are waiting already: try again later, or raise --max-queue"
            )
        self.lanes.setdefault(request.user, deque()).append(request)

    def push_front(self, request: Request) -> None:
        """Never refused: it was let in before."""
        self.front.appendleft(request)

    def peek(self) -> Request | None:
        """What `pop` will give."""
        if self.front:
            return self.front[0]
        return next((lane[0] for lane in self.lanes.values()), None)

    def pop(self) -> Request:
        if self.front:
            return self.front.popleft()
        user = next(iter(self.lanes))
        lane = self.lanes.pop(user)
        request = lane.popleft()
        if lane:
            self.lanes[user] = lane  # behind the others
        return request

    def remove(self, id: str) -> Request | None:
        """The request that waited under this id; None if there was none."""
        for request in self:
            if request.id == id:
                break
        else:
            return None
        if request in self.front:
            self.front.remove(request)
        else:
            lane = self.lanes[request.user]
            lane.remove(request)
            if not lane:
                del self.lanes[request.user]
        return request

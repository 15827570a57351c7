"""What a request's owner holds: pieces of the answer as they come, for threads and for asyncio."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from peagle.core import Step
from peagle.engine.schedule.request import FinishReason
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token's own, its rank, and the likeliest tokens', of the target's raw distribution at that place; where the
    answer is bound to a grammar, of what that allows.
    """

    token: int
    logprob: float
    rank: int
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one step adds. The last piece has a `reason`."""

    step: Step | None
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None


class RequestFailed(UserError):
    """The request could not be answered; the others were."""


class RequestRefused(RequestFailed):
    """For what was asked, not for what went wrong here."""


class Stream:
    """Iterate over it (or `async for`), once; `abort()` gives the rest up."""

    def __init__(self, id: str, prompt_tokens: int, abort: Callable[[str], None]) -> None:
        self.id, self.prompt_tokens = id, prompt_tokens
        self._abort = abort
        self._pieces: queue.SimpleQueue[StreamPiece] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self.ended = False

    def put(self, piece: StreamPiece) -> None:
        """The engine's side; from any thread."""
        self._pieces.put(piece)
        if (wake := self._wake) is not None:
            wake()

    def notify(self, wake: Callable[[], None]) -> None:
        """For those who take pieces with `waiting`: called, on the engine's thread, when one has come."""
        self._wake = wake

    def abort(self) -> None:
        self._abort(self.id)

    def waiting(self) -> list[StreamPiece]:
        """What has come and was not taken yet; never blocks."""
        pieces = []
        while not self._pieces.empty():
            pieces.append(self._checked(self._pieces.get()))
        return pieces

    def __iter__(self) -> Iterator[StreamPiece]:
        while not self.ended:
            yield self._checked(self._pieces.get())

    async def __aiter__(self) -> AsyncIterator[StreamPiece]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(there.set)

        self._wake = wake
        while not self.ended:
            there.clear()
            while not self._pieces.empty():
                yield self._checked(self._pieces.get())
            if not self.ended:
                await there.wait()

    def _checked(self, piece: StreamPiece) -> StreamPiece:
        self.ended = piece.reason is not None
        if piece.reason == "refused":
            raise RequestRefused(piece.error or "the request cannot be answered")
        if piece.reason == "error":
            raise RequestFailed(piece.error or "the request failed")
        return piece

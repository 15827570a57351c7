"""Stream: the pieces of an answer as they arrive, for threads and for asyncio."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from peagle.core import Step
from peagle.engine.schedule.request import FinishReason
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability and the rank of a token, and the most likely tokens at its position.

    They are those of the target's raw distribution; with a grammar, of the tokens it allows.
    """

    token: int
    logprob: float
    rank: int  # 1: the most likely token.
    top: dict[int, float] = field(default_factory=dict)  # Log-probabilities by token.


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """The addition of one step to an answer. The last piece has a `reason`."""

    step: Step | None
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None
    stop_string: str | None = None  # The one that ended the answer, with reason "stop".


class RequestFailed(UserError):
    """The request could not be answered; other requests are not affected."""


class RequestRefused(RequestFailed):
    """The request itself is the cause: the engine works as it should."""


class Stream:
    """An answer to iterate over once, with `for` or `async for`; `abort()` ends it early."""

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        abort: Callable[[], None],
        answer: Sequence[int] = (),
    ) -> None:
        """`abort`: ends the request of this stream, and no other with the same id."""
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.answer = answer  # All tokens so far: the list that the engine extends.
        # Prompt tokens found in the prefix cache. None: the request has not left the queue yet.
        self.cached_tokens: int | None = None
        self.ended = False
        self._abort = abort
        self._pieces: queue.SimpleQueue[StreamPiece] = queue.SimpleQueue()
        self._on_piece: Callable[[], None] | None = None

    def put(self, piece: StreamPiece) -> None:
        """Add a piece; called by the engine, from any thread."""
        self._pieces.put(piece)
        if (on_piece := self._on_piece) is not None:
            on_piece()

    def on_piece(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` on the engine's thread whenever a piece has arrived; see `poll`.

        None: no longer.
        """
        self._on_piece = callback

    def abort(self) -> None:
        self._abort()

    def poll(self) -> list[StreamPiece]:
        """Return the pieces that have arrived since the last call; never blocks."""
        pieces = []
        while not self._pieces.empty():
            pieces.append(self._take())
        return pieces

    def __iter__(self) -> Iterator[StreamPiece]:
        while not self.ended:
            yield self._take()

    async def __aiter__(self) -> AsyncIterator[StreamPiece]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake_up() -> None:
            with suppress(RuntimeError):  # The event loop is closed, so the stream has no reader.
                loop.call_soon_threadsafe(arrived.set)

        self._on_piece = wake_up
        while not self.ended:
            arrived.clear()
            while not self._pieces.empty():
                yield self._take()
            if not self.ended:
                await arrived.wait()

    def _take(self) -> StreamPiece:
        """Wait for the next piece; raise if it reports a failure."""
        piece = self._pieces.get()
        self.ended = piece.reason is not None
        if piece.reason == "refused":
            raise RequestRefused(piece.error or "the request cannot be answered")
        if piece.reason == "error":
            raise RequestFailed(piece.error or "the request failed")
        return piece

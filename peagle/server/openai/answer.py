"""Answer: the choices of one request while their engine generates them.

Pieces of all choices arrive in one queue, in the order in which the engine produced them.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.remote_slot import RemoteSlot
from peagle.server.http.errors import ApiError, engine_stopped
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import TokenUsage, speculative_metrics

if TYPE_CHECKING:
    from peagle.engine.stream import Stream, StreamPiece

# Seconds between two chunks of an answer, per answer that is being streamed.
CHUNK_INTERVAL = 100e-6
# Pieces that a client may be behind. The engine is not slowed down for a client that does not read:
# its answer would keep KV pages from others.
MAX_UNREAD_PIECES = 8192
MAX_UNREAD_PIECES_PER_CHOICE = 256
MIN_SLEEP = 500e-6  # Shorter waits are skipped: a sleep costs more than it saves.


class Answer:
    def __init__(self, backend: EngineBackend, slot: RemoteSlot, choices: list[Choice]) -> None:
        self.backend = backend
        self.slot = slot
        self.choices = choices
        # (choice, piece), or (choice or None, error).
        self._queue: deque[tuple[Choice | None, StreamPiece | Exception]] = deque()
        self._arrived = asyncio.Event()
        self._unfinished = sum(choice.stream is not None for choice in choices)
        self._max_unread = max(MAX_UNREAD_PIECES, MAX_UNREAD_PIECES_PER_CHOICE * len(choices))
        self._closed = False
        self._last_chunk = 0.0  # Loop time of the last streamed chunk; 0: none yet.
        self._unended = self._unfinished  # Choices whose last piece has not arrived yet.
        self._pause: asyncio.Future[None] | None = None  # The wait between two chunks.
        for choice in choices:
            if choice.stream is not None:
                self._subscribe(choice, choice.stream)
        backend.drain.in_flight.add(self)
        self._timer = self._start_timer(backend.settings.timeout)

    def _start_timer(self, seconds: float) -> asyncio.TimerHandle | None:
        if not seconds:
            return None
        error = ApiError(
            504, f"the answer was not complete after {seconds:g} seconds: lower max_tokens"
        )
        return asyncio.get_running_loop().call_later(seconds, self.abort, error)

    async def next(self, single: bool = False) -> "tuple[Choice, StreamPiece] | None":
        """The next piece, of any choice; None when all choices have finished.

        Pieces of a choice that have accumulated are joined unless `single`: where the engine is
        faster than the network, chunks grow.
        """
        if not self._unfinished:
            return None
        if not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        if not single:
            await self._pace()
        choice, piece = self._queue.popleft()
        if isinstance(piece, Exception):
            raise self._api_error(piece)
        assert choice is not None
        previous = choice.last_token
        self._take(choice, piece)
        if self._queue and not single:
            piece = self._join_queued(choice, piece)
        if piece.step is not None:
            seconds = choice.last_token - (previous or choice.timing.arrival)
            self.backend.request_metrics.observe_chunk(self.slot.name, seconds, first=not previous)
        return choice, piece

    @property
    def is_finished(self) -> bool:
        """Whether all choices have finished, and `next` has returned all pieces."""
        return not self._unfinished

    async def wait(self) -> None:
        """Wait until all choices have finished. Nothing is streamed, so nothing is paced."""
        while await self.next(single=True) is not None:
            pass

    async def _pace(self) -> None:
        """Space out chunks: sending costs time that the engine needs.

        The more answers are streamed at once, the rarer and longer are the chunks of each. The end
        of an answer does not wait: its client may send the next request.
        """
        if not self._last_chunk:
            self.backend.open_streams += 1
        loop = asyncio.get_running_loop()
        wait = self._last_chunk + CHUNK_INTERVAL * self.backend.open_streams - loop.time()
        if wait > MIN_SLEEP and self._unended > 0:
            self._pause = pause = loop.create_future()
            timer = loop.call_later(wait, end_pause, pause)
            try:
                await pause
            finally:
                timer.cancel()
                self._pause = None
        self._last_chunk = loop.time()

    def _join_queued(self, choice: Choice, piece: "StreamPiece") -> "StreamPiece":
        """Join the queued pieces of this choice, up to an error. Other pieces keep their order."""
        pieces: list[StreamPiece] = [piece]
        others: list[tuple[Choice | None, StreamPiece | Exception]] = []
        while self._queue:
            owner, queued = self._queue[0]
            if isinstance(queued, Exception):
                break
            self._queue.popleft()
            if owner is choice:
                self._take(choice, queued)
                pieces.append(queued)
            else:
                others.append((owner, queued))
        self._queue.extendleft(reversed(others))
        return join_pieces(pieces) if len(pieces) > 1 else piece

    def _take(self, choice: Choice, piece: "StreamPiece") -> None:
        choice.add_piece(piece)
        self._unfinished -= piece.reason is not None

    def abort(self, error: ApiError) -> None:
        """Make `next` raise this error."""
        self._put(None, error)

    def close(self) -> None:
        """Abort unfinished choices, which frees their KV pages, and count the finished ones."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._abort_streams()
        self.backend.drain.in_flight.discard(self)
        self.backend.open_streams -= bool(self._last_chunk)
        for choice in self.choices:
            if choice.finish_reason is not None and choice.tokens:
                self.backend.request_metrics.observe_request(
                    self.slot.name, choice.finished_request()
                )

    def _abort_streams(self) -> None:
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.on_piece(None)  # It held this answer, which holds the engine.
                if choice.finish_reason is None:
                    choice.stream.abort()

    def log_fields(self) -> dict[str, Any]:
        """The fields of this answer in the log line of its request."""
        delays = [
            choice.first_token - choice.timing.arrival
            for choice in self.choices
            if choice.first_token
        ]
        usage = TokenUsage.of(self.choices)
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "engine": self.slot.name,
            "worker": self.slot.connection.name,
            "finish_reasons": [choice.finish_reason for choice in self.choices],
            "ttft": round(min(delays), 4) if delays else None,
            "acceptance_length": speculative_metrics(self.choices)["mean_acceptance_length"],
        }

    def _subscribe(self, choice: Choice, stream: "Stream") -> None:
        """Queue the pieces that the stream has now, and those that follow."""

        def collect() -> None:
            try:
                for piece in stream.poll():
                    if piece.reason == "abort":
                        self._put(choice, ApiError(503, "the request was aborted"))
                    else:
                        self._put(choice, piece)
            except UserError as error:  # The request failed, or the engine did.
                self._put(choice, error)

        stream.on_piece(collect)
        collect()

    def _put(self, choice: Choice | None, piece: "StreamPiece | Exception") -> None:
        self._queue.append((choice, piece))
        self._arrived.set()
        if isinstance(piece, Exception):
            self._unended = 0
        else:
            self._unended -= piece.reason is not None
        if self._unended <= 0 and self._pause is not None:
            end_pause(self._pause)
        if len(self._queue) > self._max_unread:
            self._abort_streams()
            self._queue.clear()
            self._queue.append((None, ApiError(400, "the client reads its answer too slowly")))

    def _api_error(self, error: Exception) -> ApiError:
        from peagle.engine.stream import RequestRefused

        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestRefused):
            return ApiError(400, str(error))
        if self.slot.closed:
            return engine_stopped()
        return ApiError(500, str(error))


def end_pause(pause: "asyncio.Future[None]") -> None:
    if not pause.done():
        pause.set_result(None)


def join_pieces(pieces: "Sequence[StreamPiece]") -> "StreamPiece":
    steps = [piece.step for piece in pieces if piece.step is not None]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        logprobs=tuple(token for piece in pieces for token in piece.logprobs),
        step=steps[-1] if steps else None,
    )

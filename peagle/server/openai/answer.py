"""An answer as it grows: one choice a stream of the engine, all their pieces in the order they come."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.server.engines.driver import EngineSlot, Ticket
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.errors import ApiError

if TYPE_CHECKING:
    from peagle.core import Step
    from peagle.engine.stream import Stream, StreamPiece, TokenLogprob

PACE = 100e-6  # seconds between two chunks of an answer, for each that is being sent
SHORTEST = 500e-6  # a wait that pays


@dataclass(slots=True, eq=False)
class Choice:
    index: int
    prompt: list[int]
    ticket: Ticket
    stream: "Stream | None" = None  # None: nothing is to be generated
    scored: "list[TokenLogprob] | None" = (
        None  # of the prompt, where it is echoed with log-probabilities
    )
    text: str = ""
    tokens: int = 0
    steps: "list[Step]" = field(default_factory=list)
    logprobs: "list[TokenLogprob]" = field(default_factory=list)
    reason: str | None = None
    first: float = 0.0
    last: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def take(self, piece: "StreamPiece") -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.reason = piece.reason
        if piece.step is not None:
            self.steps.append(piece.step)
            self.tokens += len(piece.step.tokens)
            self.last = time.monotonic()
            self.first = self.first or self.last


class Answer:
    def __init__(self, front: LocalBackend, slot: EngineSlot, choices: list[Choice]) -> None:
        self.front, self.slot, self.choices = front, slot, choices
        self._news: deque[tuple[Choice | None, StreamPiece | Exception]] = deque()
        self._there = asyncio.Event()
        self._left = sum(choice.stream is not None for choice in choices)
        self._closed = False
        self._sent = 0.0  # when the last chunk was taken; 0: none was
        for choice in choices:
            if choice.stream is not None:
                self._hear(choice, choice.stream)
        front.drain.in_flight.add(self)
        self._timer = self._limit(front.settings.timeout)

    def _limit(self, seconds: float) -> asyncio.TimerHandle | None:
        late = ApiError(504, f"the answer was not complete after {seconds:g} seconds: ask for less")
        return asyncio.get_running_loop().call_later(seconds, self.abort, late) if seconds else None

    async def next(self, single: bool = False) -> "tuple[Choice, StreamPiece] | None":
        """What comes next, of whichever choice; None when all have ended.

        A choice's pieces that have piled up are one, unless `single`: where the engine is faster than we can send,
        chunks grow.
        """
        if not self._left:
            return None
        if not self._news:
            self._there.clear()
            await self._there.wait()
        if not single:
            await self._pace()
        choice, piece = self._news.popleft()
        if isinstance(piece, Exception):
            raise self._told(piece)
        assert choice is not None
        before = choice.last
        self._take(choice, piece)
        if self._news and not single:
            piece = self._with_more(choice, piece)
        if piece.step is not None:
            began = before or choice.ticket.arrival
            self.front.measured.piece(self.slot.name, choice.last - began, first=not before)
        return choice, piece

    async def whole(self) -> None:
        """Nothing is sent meanwhile, so that nothing is held back."""
        while await self.next(single=True) is not None:
            pass

    async def _pace(self) -> None:
        """The more are answered at once, the rarer and longer are the chunks of each: sending costs the engine time."""
        if not self._sent:
            self.front.streams += 1
        clock = asyncio.get_running_loop().time
        wait = self._sent + PACE * self.front.streams - clock()
        if wait > SHORTEST:
            await asyncio.sleep(wait)
        self._sent = clock()

    def _with_more(self, choice: Choice, piece: "StreamPiece") -> "StreamPiece":
        """All that has come of this choice, up to an error, as one piece; what others said stays in its order."""
        pieces: list[StreamPiece] = [piece]
        others: list[tuple[Choice | None, StreamPiece | Exception]] = []
        while self._news:
            whose, more = self._news[0]
            if isinstance(more, Exception):
                break
            self._news.popleft()
            if whose is choice:
                self._take(choice, more)
                pieces.append(more)
            else:
                others.append((whose, more))
        self._news.extendleft(reversed(others))
        return joined(pieces) if len(pieces) > 1 else piece

    def _take(self, choice: Choice, piece: "StreamPiece") -> None:
        choice.take(piece)
        self._left -= piece.reason is not None

    def abort(self, error: ApiError) -> None:
        """Whoever reads is told."""
        self._put(None, error)

    def close(self) -> None:
        """The end, whatever it was: pages are free again."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for choice in self.choices:
            if choice.stream is not None and choice.reason is None:
                choice.stream.abort()
        self.front.engines.driver.wake()
        self.front.drain.in_flight.discard(self)
        self.front.streams -= bool(self._sent)
        self.front.measured.answer(self)

    @property
    def usage(self) -> dict[str, Any]:
        prompts = {
            id(choice.prompt): choice.prompt_tokens for choice in self.choices
        }  # n choices share a prompt
        read, said = sum(prompts.values()), sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}

    @property
    def speculation(self) -> dict[str, Any]:
        """How drafts fared, all choices together; under vLLM's names."""
        steps = [step for choice in self.choices for step in choice.steps if step.drafted]
        drafted, accepted = (
            sum(step.drafted for step in steps),
            sum(step.accepted for step in steps),
        )
        most = max((step.drafted for step in steps), default=0)
        histogram = (
            [sum(step.accepted == count for step in steps) for count in range(most + 1)]
            if steps
            else []
        )
        return {
            "mean_acceptance_length": round(1 + accepted / len(steps), 4) if steps else 1.0,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }

    def notes(self) -> dict[str, Any]:
        """For the log."""
        started = [choice for choice in self.choices if choice.first]
        wait = min((choice.first - choice.ticket.arrival for choice in started), default=None)
        return self.usage | {
            "engine": self.slot.name,
            "finish_reasons": [choice.reason for choice in self.choices],
            "ttft": None if wait is None else round(wait, 4),
            "acceptance_length": self.speculation["mean_acceptance_length"],
        }

    def _hear(self, choice: Choice, stream: "Stream") -> None:
        """Pieces that are there now, and those that come."""
        bell = self.front.engines.driver.bell

        def collect() -> None:
            try:
                for piece in stream.poll():
                    aborted = piece.reason == "abort"
                    self._put(
                        choice, ApiError(503, "the request was aborted") if aborted else piece
                    )
            except UserError as error:  # the request failed, or the engine did
                self._put(choice, error)

        bell.listen()
        stream.on_piece(lambda: bell.ring(collect))
        collect()

    def _put(self, choice: Choice | None, piece: "StreamPiece | Exception") -> None:
        self._news.append((choice, piece))
        self._there.set()

    def _told(self, error: Exception) -> ApiError:
        from peagle.engine.stream import RequestRefused

        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestRefused):
            return ApiError(400, str(error))
        if self.slot.engine.closed:
            return ApiError(503, "the engine stopped while it answered: try again", retry_after=2)
        return ApiError(500, str(error))


def joined(pieces: "list[StreamPiece]") -> "StreamPiece":
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        logprobs=tuple(token for piece in pieces for token in piece.logprobs),
        step=next((piece.step for piece in reversed(pieces) if piece.step is not None), None),
    )

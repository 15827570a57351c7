"""An answer as it grows: one choice a stream of the engine, all their pieces in the order they come."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.server.driver import Slot, Ticket
from peagle.server.errors import ApiError
from peagle.server.front import Front

if TYPE_CHECKING:
    from peagle.core import Step
    from peagle.engine.stream import Piece, Stream, TokenLogprob

PACE = 100e-6  # seconds between two chunks of an answer, for each answer under way
SHORTEST = 500e-6  # a wait that pays


@dataclass(slots=True, eq=False)
class Choice:
    index: int
    prompt: list[int]
    ticket: Ticket
    stream: "Stream | None" = None  # None: nothing is to be generated
    scored: "list[TokenLogprob] | None" = None  # of the prompt, where it is echoed with log-probabilities
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

    def take(self, piece: "Piece") -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.reason = piece.reason
        if piece.step is not None:
            self.steps.append(piece.step)
            self.tokens += len(piece.step.tokens)
            self.last = time.monotonic()
            self.first = self.first or self.last


class Answer:
    def __init__(self, front: Front, slot: Slot, choices: list[Choice]) -> None:
        self.front, self.slot, self.choices = front, slot, choices
        self._news: deque[tuple[Choice | None, Piece | Exception]] = deque()
        self._there = asyncio.Event()
        self._left = sum(choice.stream is not None for choice in choices)
        self._closed = False
        self._sent = 0.0  # when the last piece was taken
        for choice in choices:
            if choice.stream is not None:
                self._hear(choice, choice.stream)
        front.drain.answers.add(self)
        self._timer = self._limit(front.settings.timeout)

    def _limit(self, seconds: float) -> asyncio.TimerHandle | None:
        late = ApiError(504, f"the answer was not complete after {seconds:g} seconds: ask for less")
        return asyncio.get_running_loop().call_later(seconds, self.abort, late) if seconds else None

    async def next(self, single: bool = False) -> "tuple[Choice, Piece] | None":
        """What comes next, of whichever choice; None when all have ended.

        Pieces that have piled up are one, unless `single`: where the engine is faster than we can send, chunks grow.
        """
        if not self._left:
            return None
        if not self._news:
            self._there.clear()
            await self._there.wait()
        if not single:
            await self._pace()
        before = self._news[0][0].last if self._news[0][0] is not None else 0.0
        choice, piece = self._take()
        while self._news and not single and self._news[0][0] is choice and not isinstance(self._news[0][1], Exception):
            more = self._take()[1]
            piece = replace(
                more, text=piece.text + more.text, logprobs=piece.logprobs + more.logprobs, step=more.step or piece.step
            )
        if piece.step is not None:
            began = before or choice.ticket.arrival
            self.front.measured.piece(self.slot.name, choice.last - began, first=not before)
        return choice, piece

    async def _pace(self) -> None:
        """The more are answered at once, the rarer and longer are the chunks of each: sending costs the engine time."""
        clock = asyncio.get_running_loop().time
        wait = self._sent + PACE * len(self.front.drain.answers) - clock()
        if wait > SHORTEST:
            await asyncio.sleep(wait)
        self._sent = clock()

    def _take(self) -> "tuple[Choice, Piece]":
        choice, piece = self._news.popleft()
        if isinstance(piece, Exception):
            raise self._told(piece)
        assert choice is not None
        if piece.reason == "abort":
            raise ApiError(503, "the request was aborted")
        choice.take(piece)
        self._left -= piece.reason is not None
        return choice, piece

    async def whole(self) -> None:
        while await self.next() is not None:
            pass

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
        self.front.drain.answers.discard(self)
        self.front.measured.answer(self)

    @property
    def usage(self) -> dict[str, Any]:
        prompts = {id(choice.prompt): choice.prompt_tokens for choice in self.choices}  # n choices share a prompt
        read, said = sum(prompts.values()), sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}

    @property
    def speculation(self) -> dict[str, Any]:
        """How drafts fared, all choices together; under vLLM's names."""
        steps = [step for choice in self.choices for step in choice.steps if step.drafted]
        drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
        most = max((step.drafted for step in steps), default=0)
        histogram = [sum(step.accepted == count for step in steps) for count in range(most + 1)] if steps else []
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
                for piece in stream.waiting():
                    self._put(choice, piece)
            except UserError as error:  # the request failed, or the engine did
                self._put(choice, error)

        bell.listen()
        stream.notify(lambda: bell.ring(collect))
        collect()

    def _put(self, choice: Choice | None, piece: "Piece | Exception") -> None:
        self._news.append((choice, piece))
        self._there.set()

    def _told(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if self.slot.engine.closed:
            return ApiError(503, "the engine stopped while it answered: try again", retry_after=2)
        return ApiError(500, str(error))

"""Choice: one answer to one prompt, as it grows."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.front.metrics import FinishedRequest

if TYPE_CHECKING:
    from peagle.core import Step
    from peagle.engine.stream import Stream, StreamPiece, TokenLogprob


@dataclass(slots=True)
class DraftCounts:
    """What the steps of an answer drafted and accepted."""

    drafted: int = 0
    accepted: int = 0
    # Steps that drafted, by the number of accepted drafts.
    histogram: list[int] = field(default_factory=list)

    def add(self, step: "Step") -> None:
        if not step.drafted:
            return
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.extend(step.drafted)
        self.histogram[step.accepted] += 1

    def merge(self, other: "DraftCounts") -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.extend(len(other.histogram) - 1)
        for accepted, steps in enumerate(other.histogram):
            self.histogram[accepted] += steps

    def extend(self, drafted: int) -> None:
        """Make room for steps of that many drafts."""
        self.histogram += [0] * (drafted + 1 - len(self.histogram))


@dataclass(slots=True, eq=False)
class Choice:
    prompt: list[int]
    timing: RequestTiming
    stream: "Stream | None" = None  # None: no tokens are generated.
    index: int = 0  # Among all choices of the response.
    # Log-probabilities of prompt[1:], if the prompt is echoed with them.
    prompt_logprobs: "list[TokenLogprob] | None" = None
    text: str = ""
    tokens: int = 0
    cached_tokens: int = 0  # Prompt tokens found in the prefix cache; known with the first token.
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    logprobs: "list[TokenLogprob]" = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None  # The stop string that ended the answer.
    first_token: float = 0.0  # Monotonic seconds; 0: there is no token yet.
    last_token: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def add_piece(self, piece: "StreamPiece") -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.finish_reason = piece.reason
        self.stop_string = piece.stop_string
        if piece.step is not None:
            if not self.tokens and self.stream is not None:
                self.cached_tokens = self.stream.cached_tokens or 0
            self.draft_counts.add(piece.step)
            self.tokens += len(piece.step.tokens)
            self.last_token = time.monotonic()
            self.first_token = self.first_token or self.last_token

    def finished_request(self) -> FinishedRequest:
        return FinishedRequest(
            arrival=self.timing.arrival,
            admitted=self.timing.admitted,
            first_token=self.first_token,
            last_token=self.last_token,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.tokens,
        )

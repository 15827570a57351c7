"""A request on its way through the engine: what was asked, and how far the answer has come.

    prompt 5 6 7, output 8 9        position   0 1 2 3 4
                                    token      5 6 7 8 9     length 5
                                    in pages   x x x x -     computed 4: the newest token is not consumed yet

While a request decodes, `computed` is `length - 1`. Before its first output token it is, at the end, the whole prompt.
So a prefill has one goal, also after a preemption: all tokens but the newest where there is output (what the pass says
of the next token is known already and is not taken), the whole prompt where there is none (it gives the first token).
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from peagle.core import Sampling
from peagle.errors import UserError

Status = Literal["waiting", "prefill", "decode", "finished"]
FinishReason = Literal[
    "stop", "length", "abort", "error", "refused"
]  # refused: its grammar was too much
MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """When an answer ends, and what is told about its tokens."""

    max_tokens: int
    min_tokens: int = 0  # no stop before so many
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # besides the target's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None: not told; n: of the token taken and of the n likeliest

    def __post_init__(self) -> None:
        rules = {
            "max_tokens must be 1 or more": self.max_tokens >= 1,
            f"min_tokens must be in 0..max_tokens ({self.max_tokens})": 0
            <= self.min_tokens
            <= self.max_tokens,
            "stop must not hold an empty string: leave it out": all(self.stop),
            "stop_ids must be 0 or more": all(token >= 0 for token in self.stop_ids),
            f"logprobs must be in 0..{MOST_LOGPROBS}": self.logprobs is None
            or 0 <= self.logprobs <= MOST_LOGPROBS,
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(f"{rule}; got {getattr(self, rule.split()[0])!r}")


@dataclass(slots=True, eq=False)  # a request equals itself only
class Request:
    id: str
    prompt: list[int]
    sampling: Sampling
    limits: RequestLimits
    user: str = ""  # users take turns in the queue
    arrival: float = field(default_factory=time.monotonic)

    output: list[int] = field(default_factory=list)
    computed: int = (
        0  # tokens whose KV is in the pages: consumed by the target, seen by the drafter
    )
    ahead: int = 0  # at most so many more will be, by steps under way that nobody has read back; the engine counts them
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens found in the prefix table when it was last admitted
    status: Status = "waiting"
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def tokens(self) -> list[int]:
        """A new list: dear for long prompts."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def goal(self) -> int:
        """Where a prefill ends: before the newest token, or with the prompt if nothing has come after it."""
        return len(self.prompt) + max(0, len(self.output) - 1)

    @property
    def under_way(self) -> bool:
        """Some step's result has not been read back: decoded tokens, or the prompt's first token."""
        return self.ahead > 0 or (self.status == "decode" and not self.output)

    @property
    def finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The tokens start..end-1 of a request, to be prefilled."""

    request: Request
    start: int
    end: int

    @property
    def ids(self) -> list[int]:
        return self.request.tokens[self.start : self.end]

    @property
    def next_id(self) -> int | None:
        """The token after the chunk, for the drafter's last row. None: the pass says it, and `first` takes it."""
        return self.request.tokens[self.end] if self.end < self.request.length else None

"""Request: a prompt on its way through the engine, and how far its answer has come.

    prompt 5 6 7, output 8 9        position   0 1 2 3 4
                                    token      5 6 7 8 9     length 5
                                    in pages   x x x x -     computed 4

The newest token is not computed yet: while a request decodes, `computed` is `length - 1`. Before
the first output token, `computed` ends up at the whole prompt. A prefill therefore has one end,
also after a preemption: with output, all tokens but the newest (the pass repeats a token that is
known, and its result is not used); without output, the whole prompt (the pass gives the first
token).
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from peagle.core import Sampling
from peagle.errors import UserError

RequestStatus = Literal["waiting", "prefill", "decode", "finished"]
# refused: the answer cannot follow its grammar.
FinishReason = Literal["stop", "length", "abort", "error", "refused"]
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """When an answer ends, and how many log-probabilities come with each token."""

    max_tokens: int
    min_tokens: int = 0  # The answer does not stop before this many tokens.
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # In addition to the target's own end tokens.
    ignore_eos: bool = False
    logprobs: int | None = None  # Of the token and of this many most likely ones; None: off.

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("max_tokens", self.max_tokens >= 1, "must be 1 or more"),
            (
                "min_tokens",
                0 <= self.min_tokens <= self.max_tokens,
                f"must be in 0..max_tokens ({self.max_tokens})",
            ),
            ("stop", all(self.stop), "must not contain an empty string: leave it out"),
            ("stop_ids", all(token >= 0 for token in self.stop_ids), "must be 0 or more"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"must be in 0..{MAX_LOGPROBS}",
            ),
        ):
            if not valid:
                raise UserError(f"`{name}` {rule}; got {getattr(self, name)!r}")


@dataclass(slots=True, eq=False)  # Requests are compared by identity.
class Request:
    id: str
    prompt: list[int]
    sampling: Sampling
    limits: RequestLimits
    user: str = ""  # Users take turns in the queue.
    cache_salt: str = ""  # Requests with different salts share no pages.
    arrival: float = field(default_factory=time.monotonic)

    output: list[int] = field(default_factory=list)
    # Tokens whose KV is in the pages: the target has consumed them, the drafter has seen them.
    computed: int = 0
    # Upper bound of tokens that launched steps, not read back yet, will add; the loop counts them.
    ahead: int = 0
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)  # Of the first pages, each hashed once.
    cached: int = 0  # Tokens found in the prefix table at the last admission.
    status: RequestStatus = "waiting"
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output as a new list, which is expensive for long prompts."""
        return self.prompt + self.output

    def token_range(self, start: int, end: int) -> list[int]:
        """Tokens start .. end - 1, without a copy of the others."""
        prompt_tokens = len(self.prompt)
        if end <= prompt_tokens:
            return self.prompt[start:end]
        output = self.output[max(start - prompt_tokens, 0) : end - prompt_tokens]
        return self.prompt[start:] + output

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def prefill_end(self) -> int:
        """The position where a prefill ends: the newest token, or the end of a bare prompt."""
        return len(self.prompt) + max(0, len(self.output) - 1)

    @property
    def in_flight(self) -> bool:
        """Whether a launched pass with tokens of this request is not read back yet."""
        return self.ahead > 0 or (self.status == "decode" and not self.output)

    @property
    def finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The tokens start..end-1 of a request, to be prefilled in one pass."""

    request: Request
    start: int
    end: int

    @property
    def ids(self) -> list[int]:
        return self.request.token_range(self.start, self.end)

    @property
    def next_id(self) -> int | None:
        """The token after the chunk, which the drafter's last row reads.

        None: the pass itself gives it, as the first token of the answer.
        """
        following = self.request.token_range(self.end, self.end + 1)
        return following[0] if following else None

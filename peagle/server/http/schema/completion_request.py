"""The body of /v1/completions."""

from typing import Annotated, Any

from pydantic import Field

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import MAX_INT, Items, TokenIds
from peagle.server.http.schema.generation_request import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
)

MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions.


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | TokenIds
        | Annotated[Items[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[Items[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    add_special_tokens: bool | None = None
    tools: Any = None  # Refused.

    @property
    def max_new_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def check(self) -> None:
        super().check()
        if self.tools:
            raise ApiError(400, "tools need messages: use /v1/chat/completions", "tools")
        if self.best_of not in (None, self.choices):
            raise ApiError(400, "best_of must equal n: answers are not ranked", "best_of")
        if self.max_new_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens: 0 requires echo: true; else use 1 or more", "max_tokens"
            )

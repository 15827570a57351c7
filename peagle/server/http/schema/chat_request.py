"""The body of /v1/chat/completions."""

from typing import Any, Literal

from pydantic import Field

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import MAX_INT
from peagle.server.http.schema.generation_request import MAX_TOP_LOGPROBS, GenerationRequest
from peagle.server.http.schema.message import Messages, check_contents
from peagle.server.http.schema.tool_fields import ToolChoiceField, ToolField, Tools, check_tools

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    max_thinking_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT)  # vLLM's name of the same.

    @property
    def max_new_tokens(self) -> int | None:
        """None: up to the end of the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinking_budget(self) -> int | None:
        """Tokens that the target may think; None: any number."""
        if self.max_thinking_tokens is not None:
            return self.max_thinking_tokens
        return self.thinking_token_budget

    @property
    def shown_tools(self) -> list[ToolField]:
        """The tools that the target may call, and therefore sees."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets besides messages and tools.

        An effort of "none" also turns thinking off where templates have a switch for it.
        """
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            effort = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort |= {"enable_thinking": False, "thinking": False}
        return effort | (self.chat_template_kwargs or {})

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
        check_contents(self.messages)
        check_tools(self.tools or [], self.tool_choice)


class AgentChatRequest(ChatRequest):
    """A chat request that stands for one of an API whose clients ask for very long answers."""

    ends_with_context = True

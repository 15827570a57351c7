"""The bodies of /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Content blocks and tools have one model each, with the fields of all types: whoever translates them
knows which types are supported.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import MAX_INT, Items, Name, RequestModel, TypeName
from peagle.server.http.schema.generation_request import (
    MAX_SEED,
    MAX_STOP_STRINGS,
    Extension,
    Salt,
    Stop,
)
from peagle.server.http.schema.message import MAX_CONTENT_PARTS, MAX_MESSAGES
from peagle.server.http.schema.tool_fields import MAX_TOOLS

# Fields that ask for something this server does not do, and what to do instead.
UNSUPPORTED_FIELDS = {
    "container": "nothing is executed here: leave it out",
    "mcp_servers": "this server calls no other servers: connect to them in the client",
}


class TextPart(RequestModel):
    type: TypeName
    text: str | None = None


TextParts = Annotated[Items[TextPart], Field(max_length=MAX_CONTENT_PARTS)]


class ContentBlock(RequestModel):
    """Text, tool_use, tool_result, thinking or redacted_thinking; cache_control is ignored."""

    type: TypeName
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | TextParts | None = None
    thinking: str | None = None


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[ContentBlock], Field(max_length=MAX_CONTENT_PARTS)]


class ToolParam(RequestModel):
    type: TypeName | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    display: TypeName | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: TypeName | None = None
    format: OutputFormat | None = None


class MessageMetadata(RequestModel):
    user_id: Name | None = None


class CountTokensRequest(RequestModel):
    """The fields that make the prompt."""

    model: Name | None = None
    messages: Annotated[Items[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextParts | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: Any = None
    chat_template_kwargs: dict[str, Any] | None = None  # Beyond Anthropic's fields.

    def check(self) -> None:
        """Check the rules that Pydantic cannot express."""
        for field, hint in UNSUPPORTED_FIELDS.items():
            if getattr(self, field):
                raise ApiError(400, f"{field} is not supported: {hint}", field)
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
            raise ApiError(400, "thinking.budget_tokens is missing", "thinking")
        if self.messages[-1].role == "assistant":
            raise ApiError(
                400,
                "messages: an answer always begins a new message: the last one must not be the"
                " assistant's",
                "messages",
            )


class MessageRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: Annotated[Items[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    metadata: MessageMetadata | None = None
    # Beyond Anthropic's fields, as in chat completions.
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    cache_salt: Salt | None = None
    peagle: Extension | None = None

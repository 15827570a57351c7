"""The body of /v1/responses: OpenAI's Responses API.

Items of the input, tools and parts of a content have one model each, with the fields of all types:
whoever translates them knows which types are supported.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import MAX_INT, Items, Name, RequestModel, TypeName
from peagle.server.http.schema.generation_request import MAX_SEED, Extension, Salt
from peagle.server.http.schema.message import MAX_CONTENT_PARTS, MAX_MESSAGES
from peagle.server.http.schema.tool_fields import MAX_TOOLS

MAX_METADATA = 16
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
# Fields that ask for something this server does not do, and what to do instead.
UNSUPPORTED_FIELDS = {
    "background": "responses are answered at once: leave it out",
    "conversation": "conversations are not stored: use previous_response_id, or send all items",
    "prompt": "there are no stored prompts: send instructions and input",
    "moderation": "nothing is moderated: leave it out",
    "context_management": "nothing is compacted: shorten the input yourself",
    "top_logprobs": "use logprobs of /v1/chat/completions",
}


def check_metadata_size(metadata: Any) -> Any:
    """Refuse a large dictionary before Pydantic collects the errors of all its entries."""
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise ValueError(f"there are {len(metadata)} entries, at most {MAX_METADATA} are allowed")
    return metadata


class InputPart(RequestModel):
    type: TypeName
    text: str | None = None


InputParts = Annotated[Items[InputPart], Field(max_length=MAX_CONTENT_PARTS)]


class InputItem(RequestModel):
    """A message, a function_call, a function_call_output, or reasoning."""

    type: TypeName = "message"
    role: TypeName | None = None
    content: str | InputParts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | InputParts | None = None
    summary: InputParts | None = None


class FunctionTool(RequestModel):
    type: TypeName
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolReference(RequestModel):
    type: TypeName
    name: Name | None = None


class ToolChoiceObject(RequestModel):
    type: TypeName
    name: Name | None = None
    mode: TypeName | None = None
    tools: Annotated[Items[ToolReference], Field(max_length=MAX_TOOLS)] | None = None


class TextFormat(RequestModel):
    type: TypeName
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    format: TextFormat | None = None


class ReasoningConfig(RequestModel):
    effort: TypeName | None = None
    summary: TypeName | None = None  # Ignored: the reasoning itself is returned.


class ResponseRequest(RequestModel):
    model: Name | None = None
    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[Items[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: TypeName | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[Items[Name], Field(max_length=64)] | None = None
    truncation: TypeName | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: Name | None = None
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None, BeforeValidator(check_metadata_size)
    ] = None
    user: Name | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    top_logprobs: int | None = None
    # Beyond OpenAI's fields, as in chat completions.
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    max_thinking_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    peagle: Extension | None = None

    def check(self) -> None:
        """Check the rules that Pydantic cannot express."""
        for field, hint in UNSUPPORTED_FIELDS.items():
            if getattr(self, field):
                raise ApiError(400, f"{field} is not supported: {hint}", field)
        if self.truncation not in (None, "disabled"):
            raise ApiError(400, "truncation: inputs are never truncated: shorten it", "truncation")
        if "message.output_text.logprobs" in (self.include or ()):
            raise ApiError(
                400, "include: logprobs are not supported: use /v1/chat/completions", "include"
            )

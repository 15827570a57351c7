"""A chat request from the body of /v1/messages."""

from typing import Any

from peagle.server.anthropic.message_blocks import read_conversation
from peagle.server.http.errors import ApiError
from peagle.server.http.schema.message_request import (
    CountTokensRequest,
    MessageRequest,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
)

# Fields that chat requests have under the same name.
SAME_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "cache_salt")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def prompt_body(request: CountTokensRequest) -> dict[str, Any]:
    """The fields of the chat request that make its prompt."""
    body: dict[str, Any] = {"messages": read_conversation(request).to_body()}
    if request.model is not None:
        body["model"] = request.model
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        is_thinking = request.thinking.type != "disabled"
        switches = {"enable_thinking": is_thinking, "thinking": is_thinking}
        template_kwargs = switches | template_kwargs
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    if request.output_config is not None and request.output_config.effort is not None:
        body["reasoning_effort"] = request.output_config.effort
    return body | tool_fields(request)


def chat_body(request: MessageRequest) -> dict[str, Any]:
    body = {name: value for name in SAME_FIELDS if (value := getattr(request, name)) is not None}
    body |= prompt_body(request)
    if request.stop_sequences:
        body["stop"] = request.stop_sequences
    if request.metadata is not None and request.metadata.user_id is not None:
        body["user"] = request.metadata.user_id
    if request.peagle is not None:
        body["peagle"] = request.peagle.model_dump(exclude_none=True)
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema_}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body | thinking_fields(request.thinking)


def thinking_fields(thinking: ThinkingParam | None) -> dict[str, Any]:
    if thinking is None or thinking.type != "enabled":
        return {}
    return {"max_thinking_tokens": thinking.budget_tokens}


def tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    if not request.tools:
        if request.tool_choice is not None and request.tool_choice.type in ("any", "tool"):
            raise ApiError(400, "tool_choice requires tools: list them", "tool_choice")
        return {}
    fields: dict[str, Any] = {
        "tools": [chat_tool(tool, index) for index, tool in enumerate(request.tools)]
    }
    choice = request.tool_choice
    if choice is not None:
        fields["tool_choice"] = chat_tool_choice(choice)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def chat_tool(tool: ToolParam, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise ApiError(
            400,
            f"tools.{index}: tools of type {tool.type!r} are not supported: describe it with"
            " input_schema, and call it in the client",
        )
    function: dict[str, Any] = {
        "name": tool.name,
        "parameters": tool.input_schema or {"type": "object"},
    }
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def chat_tool_choice(choice: ToolChoiceParam) -> str | dict[str, Any]:
    if choice.type != "tool":
        return TOOL_CHOICES[choice.type]
    if not choice.name:
        raise ApiError(400, "tool_choice.name is missing", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}

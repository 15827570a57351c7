"""A chat request from the body of /v1/responses."""

from typing import Any

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.response_request import (
    FunctionTool,
    ResponseRequest,
    TextFormat,
    ToolChoiceObject,
)
from peagle.server.responses.input_items import add_items
from peagle.server.translation.conversation import ChatMessage, Conversation

# Fields that chat requests have under the same name.
SAME_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stream",
    "user",
    "parallel_tool_calls",
    "max_thinking_tokens",
    "chat_template_kwargs",
    "cache_salt",
)
TOOL_CHOICES = ("auto", "none", "required")


def read_input(request: ResponseRequest, previous: list[ChatMessage]) -> list[ChatMessage]:
    """The messages of the conversation so far, without the instructions."""
    conversation = Conversation(previous)
    if isinstance(request.input, str):
        conversation.add_text("user", request.input)
    else:
        add_items(conversation, request.input)
    return conversation.messages


def chat_body(request: ResponseRequest, messages: list[ChatMessage]) -> dict[str, Any]:
    """The body of the chat request. Instructions hold for one response, so they come first."""
    body = {name: value for name in SAME_FIELDS if (value := getattr(request, name)) is not None}
    conversation = [message.to_body() for message in messages]
    if request.instructions:
        if conversation and conversation[0]["role"] == "system":
            first = conversation.pop(0)
            instructions = f"{request.instructions}\n\n{first['content']}"
        else:
            instructions = request.instructions
        conversation.insert(0, {"role": "system", "content": instructions})
    body["messages"] = conversation
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.peagle is not None:
        body["peagle"] = request.peagle.model_dump(exclude_none=True)
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        body["response_format"] = response_format(request.text.format)
    return body | tool_fields(request)


def tool_fields(request: ResponseRequest) -> dict[str, Any]:
    tools = [chat_tool(tool, index) for index, tool in enumerate(request.tools or ())]
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceObject):
        tools, chat_choice = read_tool_choice(choice, tools)
    elif choice in (None, *TOOL_CHOICES):
        chat_choice = choice
    else:
        raise ApiError(
            400, f"tool_choice: {choice!r} is not one of {', '.join(TOOL_CHOICES)}", "tool_choice"
        )
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    if chat_choice is not None and (tools or chat_choice not in ("auto", "none")):
        fields["tool_choice"] = chat_choice
    return fields


def chat_tool(tool: FunctionTool, index: int) -> dict[str, Any]:
    field = f"tools.{index}"
    if tool.type != "function":
        raise ApiError(
            400,
            f"{field}: tools of type {tool.type[:64]!r} are not supported: use functions",
            field,
        )
    if not tool.name:
        raise ApiError(400, f"{field}.name is missing", field)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def read_tool_choice(
    choice: ToolChoiceObject, tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and the choice in a chat request."""
    if choice.type == "function":
        return tools, {"type": "function", "function": {"name": choice.name or ""}}
    if choice.type == "allowed_tools":
        if choice.mode not in ("auto", "required"):
            raise ApiError(400, "tool_choice.mode must be auto or required", "tool_choice")
        names = {tool.name for tool in choice.tools or () if tool.type == "function"}
        return [tool for tool in tools if tool["function"]["name"] in names], choice.mode
    raise ApiError(
        400,
        f"tool_choice of type {choice.type!r} is not supported: use function or allowed_tools",
        "tool_choice",
    )


def response_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type in ("text", "json_object"):
        return {"type": text_format.type}
    if text_format.type != "json_schema":
        raise ApiError(
            400, "text.format.type must be text, json_schema or json_object", "text.format"
        )
    if text_format.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", "text.format")
    schema = {
        "name": text_format.name,
        "schema": text_format.schema_,
        "strict": text_format.strict,
    }
    return {"type": "json_schema", "json_schema": schema}

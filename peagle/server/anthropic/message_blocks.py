"""The messages of Anthropic's API, block by block, as messages of a conversation."""

import json

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.message_request import (
    ContentBlock,
    CountTokensRequest,
    MessageParam,
    TextPart,
)
from peagle.server.parsing.parsed_message import ToolCall
from peagle.server.translation.conversation import Conversation


def read_conversation(request: CountTokensRequest) -> Conversation:
    conversation = Conversation([])
    if request.system:
        conversation.add_text("system", text_of(request.system, "system"))
    for index, message in enumerate(request.messages):
        add_message(conversation, message, f"messages.{index}")
    return conversation


def add_message(conversation: Conversation, message: MessageParam, field: str) -> None:
    """`field` names the message in errors."""
    if isinstance(message.content, str):
        conversation.add_text(message.role, message.content)
        return
    texts: list[str] = []  # Neighboring texts of a user are one paragraph each.

    def add_texts() -> None:
        if texts:
            separator = "" if message.role == "assistant" else "\n"
            conversation.add_text(message.role, separator.join(texts))
            texts.clear()

    for index, block in enumerate(message.content):
        if block.type == "text":
            texts.append(text_in(block, f"{field}.content.{index}"))
        else:
            add_texts()
            add_block(conversation, block, message.role, f"{field}.content.{index}")
    add_texts()


def add_block(conversation: Conversation, block: ContentBlock, role: str, field: str) -> None:
    if block.type == "tool_result" and role == "user":
        call_id = require(block.tool_use_id, f"{field}.tool_use_id")
        conversation.add_tool_result(call_id, text_of(block.content or "", f"{field}.content"))
    elif block.type == "tool_use" and role == "assistant":
        call_id = require(block.id, f"{field}.id")
        name = require(block.name, f"{field}.name")
        arguments = json.dumps(block.input or {}, ensure_ascii=False)
        conversation.add_tool_call(ToolCall(call_id, name, arguments))
    elif block.type == "thinking" and role == "assistant":
        conversation.add_reasoning(block.thinking or "")
    elif block.type == "redacted_thinking" and role == "assistant":
        pass  # Only the server that encrypted it can read it.
    else:
        raise ApiError(
            400,
            f"{field}: content of type {block.type!r} is not supported in a message of the {role}:"
            " use text, tool_use (assistant), tool_result (user) or thinking (assistant)",
        )


def text_of(content: str | list[TextPart], field: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise ApiError(
                400, f"{field}: content of type {part.type!r} is not supported: use text only"
            )
    return "\n".join(text_in(part, f"{field}.{index}") for index, part in enumerate(content))


def text_in(part: ContentBlock | TextPart, field: str) -> str:
    """The text of a part of type text, which may be empty."""
    if part.text is None:
        raise ApiError(400, f"{field}.text is missing")
    return part.text


def require(value: str | None, field: str) -> str:
    if not value:
        raise ApiError(400, f"{field} is missing")
    return value

"""The input of a response, item by item, as messages of a conversation."""

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.response_request import InputItem, InputPart
from peagle.server.parsing.parsed_message import ToolCall
from peagle.server.translation.conversation import Conversation

TEXT_TYPES = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")


def add_items(conversation: Conversation, items: list[InputItem]) -> None:
    for index, item in enumerate(items):
        add_item(conversation, item, f"input.{index}")


def add_item(conversation: Conversation, item: InputItem, field: str) -> None:
    """`field` names the item in errors."""
    if item.type == "message":
        if item.role not in ROLES:
            raise refuse(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        conversation.add_text(item.role, text_of(item.content, f"{field}.content"))
    elif item.type == "function_call":
        call_id = require(item.call_id, f"{field}.call_id")
        name = require(item.name, f"{field}.name")
        conversation.add_tool_call(ToolCall(call_id, name, item.arguments or "{}"))
    elif item.type == "function_call_output":
        call_id = require(item.call_id, f"{field}.call_id")
        conversation.add_tool_result(call_id, text_of(item.output, f"{field}.output"))
    elif item.type == "reasoning":
        # A summary stands for a content that is encrypted, which only its own server can read.
        parts = item.content or item.summary or ""
        conversation.add_reasoning(text_of(parts, f"{field}.content"))
    else:
        raise refuse(
            f"{field}.type",
            f"{item.type!r} is not supported: use message, function_call, function_call_output or"
            " reasoning",
        )


def text_of(content: str | list[InputPart] | None, field: str) -> str:
    if content is None:
        raise refuse(field, "is missing")
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXT_TYPES:
            raise refuse(field, f"content of type {part.type!r} is not supported: use text only")
        if part.text is None and part.type != "refusal":  # Whose text has another name.
            raise refuse(f"{field}.{index}.text", "is missing")
    return "\n".join(part.text or "" for part in content)


def require(value: str | None, field: str) -> str:
    if not value:
        raise refuse(field, "is missing")
    return value


def refuse(field: str, problem: str) -> ApiError:
    return ApiError(400, f"{field}: {problem}", field)

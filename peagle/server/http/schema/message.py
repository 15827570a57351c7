"""Message: one message of a conversation, with its tool calls or as the result of one."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, StringConstraints

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import (
    MAX_TYPE_CHARS,
    Items,
    Name,
    RequestModel,
    TypeName,
)

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_TOOL_CALLS = 512  # Of one message.


class ContentPart(RequestModel):
    type: TypeName
    text: str | None = None


class CalledFunction(RequestModel):
    name: Name
    arguments: str | dict[str, Any] | None = None  # JSON text; None: there are none.
    _characters: int = PrivateAttr(0)

    def model_post_init(self, context: Any) -> None:
        """Count the characters while the body is checked: large ones are not on the event loop."""
        self._characters = len(self.name) + len(str(self.arguments or ""))

    @property
    def characters(self) -> int:
        return self._characters

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": parse_arguments(self.arguments)}


class MessageToolCall(RequestModel):
    id: Name | None = None
    type: TypeName | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        call = {"type": "function", "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id} | call

    @property
    def characters(self) -> int:
        """About the characters that the call adds to the prompt."""
        return len(self.id or "") + self.function.characters


class Message(RequestModel):
    role: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TYPE_CHARS)]
    content: str | Annotated[Items[ContentPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    name: Name | None = None
    # Of an assistant's message.
    tool_calls: Annotated[Items[MessageToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # The same under vLLM's newer name.
    tool_call_id: Name | None = None  # Of a tool's message: the call that it answers.

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it.

        Its content is one text, empty where there is none; a developer is the system; arguments of
        calls are objects, which templates iterate; reasoning has the name that Qwen's and
        DeepSeek's templates read, and GPT-OSS's name where its template accepts it.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
            if not (self.tool_calls and self.text):
                message["thinking"] = reasoning
        return message

    @property
    def text(self) -> str:
        """The content as one text."""
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(
                    400,
                    f"messages: content of type {part.type!r} is not supported: use text only",
                    "messages",
                )
        return "\n".join(part.text or "" for part in self.content)

    @property
    def characters(self) -> int:
        """About the characters that the message adds to the prompt."""
        reasoning = self.reasoning_content or self.reasoning or ""
        calls = sum(call.characters for call in self.tool_calls or ())
        return len(self.text) + len(reasoning) + calls

    @property
    def lacks_content(self) -> bool:
        """An assistant may have called tools instead, or thought until its answer was cut.

        Agents return such answers, often without the thoughts.
        """
        return self.content is None and self.role != "assistant"


Messages = Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def check_contents(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        if message.lacks_content:
            field = f"messages.{index}.content"
            raise ApiError(
                400,
                f"{field} is missing: give a text; only messages of an assistant may have none",
                field,
            )


def parse_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """The arguments of a call as an object; a text that is no JSON object stays a text.

    So does one with an escaped half of a surrogate pair, which no tokenizer encodes.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

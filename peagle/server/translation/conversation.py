"""Conversation: the messages of a chat request, built item by item from another API's input.

Neighboring items of one role become one message: other APIs write the text, the reasoning and the
tool calls of an answer as items of their own, and chat templates often require alternating roles.
"""

from dataclasses import dataclass, field
from typing import Any

from peagle.server.parsing.parsed_message import ToolCall
from peagle.server.translation.answer_blocks import AnswerBlock


@dataclass(slots=True)
class ChatMessage:
    role: str
    # Texts to be joined: adding them up one by one would take quadratic time.
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str = ""  # Of a tool's result.

    def to_body(self) -> dict[str, Any]:
        """The message in the body of a chat request."""
        body: dict[str, Any] = {"role": self.role, "content": "".join(self.content)}
        if self.role == "tool":
            body["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            body["reasoning_content"] = "".join(self.reasoning)
        if self.tool_calls:
            body["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return body


class Conversation:
    def __init__(self, messages: list[ChatMessage]) -> None:
        self.messages = messages

    def add_text(self, role: str, text: str) -> None:
        """Add what the system, the user or the assistant says."""
        role = "system" if role == "developer" else role
        content = self._message(role).content
        if content and role != "assistant":
            content.append("\n\n")
        content.append(text)

    def add_reasoning(self, text: str) -> None:
        if text:
            self._message("assistant").reasoning.append(text)

    def add_tool_call(self, call: ToolCall) -> None:
        self._message("assistant").tool_calls.append(call)

    def add_tool_result(self, call_id: str, text: str) -> None:
        self.messages.append(ChatMessage("tool", [text], tool_call_id=call_id))

    def add_block(self, block: AnswerBlock) -> None:
        """Add a block of an answer."""
        if block.kind == "text":
            self.add_text("assistant", block.text)
        elif block.kind == "reasoning":
            self.add_reasoning(block.text)
        else:
            self.add_tool_call(ToolCall(block.call_id, block.name, block.text))

    def to_body(self) -> list[dict[str, Any]]:
        return [message.to_body() for message in self.messages]

    def _message(self, role: str) -> ChatMessage:
        """The last message, if it is of this role, else a new one."""
        if not self.messages or self.messages[-1].role != role:
            self.messages.append(ChatMessage(role))
        return self.messages[-1]

"""The JSON object of a message: the answer in Anthropic's layout."""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from peagle.server.http.schema.message_request import MessageRequest
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import TokenUsage
from peagle.server.translation.answer_blocks import AnswerBlock

# Clients send thinking back only if it is signed. Nothing checks the signature.
SIGNATURE = "unsigned"


@dataclass(slots=True)
class MessageObject:
    request: MessageRequest
    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")

    @property
    def shows_thinking(self) -> bool:
        thinking = self.request.thinking
        return thinking is None or thinking.display != "omitted"

    def opening_body(self, choice: Choice) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(choice),
        }

    def finished_body(self, choice: Choice, blocks: list[AnswerBlock]) -> dict[str, Any]:
        content = [self.block(block) for block in blocks]
        return self.opening_body(choice) | {"content": content} | self.stop_fields(choice, blocks)

    def stop_fields(self, choice: Choice, blocks: list[AnswerBlock]) -> dict[str, Any]:
        return {
            "stop_reason": self._stop_reason(choice, blocks),
            "stop_sequence": choice.stop_string,
        }

    def block(self, block: AnswerBlock, is_empty: bool = False) -> dict[str, Any]:
        """The content block; `is_empty`: as it begins."""
        text = "" if is_empty else block.text
        if block.kind == "tool_call":
            arguments = parse_arguments(text)
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": arguments,
            }
        if block.kind == "reasoning":
            thinking = text if self.shows_thinking else ""
            signature = "" if is_empty else SIGNATURE
            return {"type": "thinking", "thinking": thinking, "signature": signature}
        return {"type": "text", "text": text, "citations": None}

    def _stop_reason(self, choice: Choice, blocks: list[AnswerBlock]) -> str:
        if choice.finish_reason == "length":
            is_full = choice.tokens < self.request.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if choice.stop_string is not None:
            return "stop_sequence"
        has_calls = any(block.kind == "tool_call" for block in blocks)
        return "tool_use" if has_calls else "end_turn"


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; those of a call that max_tokens has cut off are lost."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def message_usage(choice: Choice) -> dict[str, int]:
    usage = TokenUsage.of([choice])
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }

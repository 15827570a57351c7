"""The events of a streamed message."""

from typing import Any

from peagle.server.anthropic.message_object import SIGNATURE, MessageObject, message_usage
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import speculative_metrics
from peagle.server.translation.answer_blocks import AnswerBlock, BlockDelta, BlockEvent, BlockStart

Event = dict[str, Any]


class MessageEvents:
    def __init__(self, message: MessageObject) -> None:
        self.message = message

    def opening(self, choice: Choice) -> list[Event]:
        message = self.message.opening_body(choice)
        return [{"type": "message_start", "message": message}, ping()]

    def of_block(self, event: BlockEvent) -> list[Event]:
        block = event.block
        if isinstance(event, BlockStart):
            content_block = self.message.block(block, is_empty=True)
            return [self._event("content_block_start", block, content_block=content_block)]
        if isinstance(event, BlockDelta):
            return [self.delta(block, event.text)] if self._shows(block) else []
        ends = []
        if block.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            ends.append(self._event("content_block_delta", block, delta=signature))
        return [*ends, self._event("content_block_stop", block)]

    def delta(self, block: AnswerBlock, text: str) -> Event:
        if block.kind == "tool_call":
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return self._event("content_block_delta", block, delta=delta)

    def ending(self, choice: Choice, blocks: list[AnswerBlock]) -> list[Event]:
        message_delta = {
            "type": "message_delta",
            "delta": self.message.stop_fields(choice, blocks),
            "usage": message_usage(choice),
            "metrics": {"speculative_decoding": speculative_metrics([choice])},
        }
        return [message_delta, {"type": "message_stop"}]

    def _shows(self, block: AnswerBlock) -> bool:
        return block.kind != "reasoning" or self.message.shows_thinking

    def _event(self, event_type: str, block: AnswerBlock, **fields: Any) -> Event:
        return {"type": event_type, "index": block.index} | fields


def ping() -> Event:
    return {"type": "ping"}

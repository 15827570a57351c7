"""The events of a streamed response, numbered in their order."""

from typing import Any

from peagle.server.http.errors import ApiError
from peagle.server.responses.response_object import ResponseObject, content_part
from peagle.server.translation.answer_blocks import AnswerBlock, BlockDelta, BlockEvent, BlockStart

TEXT_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
ARGUMENTS_EVENT = "response.function_call_arguments"
Event = dict[str, Any]


class ResponseEvents:
    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self.item_status = "completed"  # Of the items that end.
        self._count = 0

    def opening(self) -> list[Event]:
        body = self.response.body("in_progress")
        names = ("created", "in_progress")
        return [self._event(f"response.{name}", response=body) for name in names]

    def of_block(self, event: BlockEvent) -> list[Event]:
        if isinstance(event, BlockStart):
            return self._start(event.block)
        if isinstance(event, BlockDelta):
            return [self.delta(event.block, event.text)]
        return self._end(event.block)

    def delta(self, block: AnswerBlock, text: str) -> Event:
        if block.kind == "tool_call":
            return self._event(f"{ARGUMENTS_EVENT}.delta", **self._place(block), delta=text)
        logprobs: Event = {"logprobs": []} if block.kind == "text" else {}
        place = self._place(block) | {"content_index": 0}
        return self._event(f"{TEXT_EVENTS[block.kind]}.delta", **place, delta=text, **logprobs)

    def in_progress(self) -> Event:
        return self._event("response.in_progress", response=self.response.body("in_progress"))

    def finished(self, body: dict[str, Any]) -> Event:
        """`body`: of the response, whose status is completed or incomplete."""
        return self._event(f"response.{body['status']}", response=body)

    def failed(self, error: ApiError) -> list[Event]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if 400 <= error.status < 500 and error.status != 429:
            code = "invalid_prompt"
        body = self.response.body("failed") | {"error": {"code": code, "message": error.message}}
        return [
            self._event("error", code=code, message=error.message, param=error.param),
            self._event("response.failed", response=body),
        ]

    def _start(self, block: AnswerBlock) -> list[Event]:
        item = self.response.item(block, "in_progress", is_empty=True)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "tool_call":
            return [added]
        place = self._place(block) | {"content_index": 0}
        part = content_part(block, is_empty=True)
        return [added, self._event("response.content_part.added", **place, part=part)]

    def _end(self, block: AnswerBlock) -> list[Event]:
        place = self._place(block)
        if block.kind == "tool_call":
            call = {"name": block.name, "arguments": block.text}
            ends = [self._event(f"{ARGUMENTS_EVENT}.done", **place, **call)]
        else:
            place |= {"content_index": 0}
            text: Event = {"text": block.text}
            if block.kind == "text":
                text["logprobs"] = []
            ends = [
                self._event(f"{TEXT_EVENTS[block.kind]}.done", **place, **text),
                self._event("response.content_part.done", **place, part=content_part(block)),
            ]
        item = self.response.item(block, self.item_status)
        done = self._event("response.output_item.done", output_index=block.index, item=item)
        return [*ends, done]

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        return {"item_id": self.response.item_id(block), "output_index": block.index}

    def _event(self, event_type: str, **fields: Any) -> Event:
        event = {"type": event_type, "sequence_number": self._count} | fields
        self._count += 1
        return event

"""The JSON object of a response: what was asked, and what was answered."""

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from peagle.server.http.schema.response_request import FunctionTool, ResponseRequest, TextFormat
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import TokenUsage, speculative_metrics
from peagle.server.translation.answer_blocks import AnswerBlock

ITEM_PREFIXES = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}


@dataclass(slots=True)
class ResponseObject:
    request: ResponseRequest
    model: str
    is_stored: bool
    # Whoever knows the id can continue the response, so clients do not choose it.
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def body(self, status: str) -> dict[str, Any]:
        """The response before it has an answer."""
        answer: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
        }
        return answer | self._asked()

    def _asked(self) -> dict[str, Any]:
        """What the request asks for, with the defaults."""
        request = self.request
        reasoning = request.reasoning
        text_format = request.text.format if request.text is not None else None
        return {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "store": self.is_stored,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": format_body(text_format)},
            "tool_choice": self._tool_choice(),
            "tools": [tool_body(tool) for tool in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def finished_body(self, choice: Choice, blocks: list[AnswerBlock]) -> dict[str, Any]:
        is_complete = choice.finish_reason != "length"
        body = self.body("completed" if is_complete else "incomplete")
        last = len(blocks) - 1
        body["output"] = [
            self.item(block, "completed" if is_complete or block.index < last else "incomplete")
            for block in blocks
        ]
        if is_complete:
            body["completed_at"] = int(time.time())
        else:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["usage"] = response_usage(choice)
        body["metrics"] = {"speculative_decoding": speculative_metrics([choice])}
        return body

    def item_id(self, block: AnswerBlock) -> str:
        return f"{ITEM_PREFIXES[block.kind]}_{self.id.removeprefix('resp_')}_{block.index}"

    def item(self, block: AnswerBlock, status: str, is_empty: bool = False) -> dict[str, Any]:
        """The item of a block; `is_empty`: as it begins."""
        item: dict[str, Any] = {"id": self.item_id(block), "status": status}
        if block.kind == "tool_call":
            arguments = "" if is_empty else block.text
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return item | {"type": "function_call"} | call
        content = [] if is_empty else [content_part(block)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _tool_choice(self) -> Any:
        choice = self.request.tool_choice
        if choice is None:
            return "auto"
        return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def content_part(block: AnswerBlock, is_empty: bool = False) -> dict[str, Any]:
    text = "" if is_empty else block.text
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def format_body(text_format: TextFormat | None) -> dict[str, Any]:
    if text_format is None:
        return {"type": "text"}
    return text_format.model_dump(by_alias=True, exclude_none=True)


def tool_body(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def response_usage(choice: Choice) -> dict[str, Any]:
    usage = TokenUsage.of([choice])
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # They are not counted apart.
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

"""/v1/chat/completions."""

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from peagle.server.front.engine_backend import EngineBackend, engine_backend_of
from peagle.server.http.limits import validate_body
from peagle.server.http.schema import ChatRequest
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.openai.chat_answer import ChatAnswer, start_chat
from peagle.server.openai.choice import Choice
from peagle.server.openai.logprobs import chat_logprobs
from peagle.server.openai.reply import Reply
from peagle.server.parsing.answer_part import AnswerPart, Content, Reasoning, ToolCallStart
from peagle.server.parsing.parsed_message import ParsedMessage, ToolCall
from peagle.server.tokenization.token_text import TokenTexts

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


async def chat(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)
    chat_request = await validate_body(request, ChatRequest, body)
    backend.require(chat_request.model)
    return await cancel_on_disconnect(request, respond(request, backend, chat_request))


async def respond(request: Request, backend: EngineBackend, body: ChatRequest) -> Response:
    chat_answer = await start_chat(request, backend, body)
    texts = backend.engines.require_text().texts
    layout = ChatLayout(chat_answer, texts, body)
    return await Reply(backend, body, chat_answer.answer, layout).response(request)


class ChatLayout:
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, chat_answer: ChatAnswer, texts: TokenTexts, body: ChatRequest) -> None:
        self.chat_answer = chat_answer
        self.texts = texts
        self.logprobs = body.logprobs_count is not None
        self.include_reasoning = body.include_reasoning is not False

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def pieces(self, choice: Choice, piece: "StreamPiece") -> list[dict[str, Any]]:
        """One chunk for each part; the first has the log-probabilities of all tokens."""
        parts = self.chat_answer.parse(choice, piece)
        deltas = [part_delta(part) for part in parts if self._is_shown(part)]
        if piece.logprobs and self.logprobs:
            deltas = deltas or [{"content": ""}]
        chunks = [self._delta(choice, delta) for delta in deltas]
        if piece.logprobs and self.logprobs:
            chunks[0]["logprobs"] = chat_logprobs(self.texts, piece.logprobs)
        return chunks

    def empty(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {"content": ""})

    def ending(self, choice: Choice) -> dict[str, Any]:
        finish_reason = self.chat_answer.finish_reason(choice)
        return self._delta(choice, {}) | {"finish_reason": finish_reason}

    def whole(self, choice: Choice) -> dict[str, Any]:
        message = self.chat_answer.parse_whole(choice)
        return {
            "index": choice.index,
            "message": message_fields(message, self.include_reasoning),
            "logprobs": chat_logprobs(self.texts, choice.logprobs) if self.logprobs else None,
            "finish_reason": self.chat_answer.finish_reason(choice),
        }

    def _is_shown(self, part: AnswerPart) -> bool:
        return self.include_reasoning or not isinstance(part, Reasoning)

    def _delta(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


def part_delta(part: AnswerPart) -> dict[str, Any]:
    """The delta of a part. Reasoning has two names: DeepSeek's, and vLLM's newer one."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text, "reasoning": part.text}
    if isinstance(part, ToolCallStart):
        call = ToolCall(part.id, part.name)
        return {"tool_calls": [{"index": part.index} | call_fields(call)]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def message_fields(message: ParsedMessage, include_reasoning: bool) -> dict[str, Any]:
    """The message of a whole response; the content is null if there are only calls."""
    has_calls = bool(message.tool_calls)
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": None if has_calls and not message.content else message.content,
        "refusal": None,
    }
    if message.reasoning and include_reasoning:
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if has_calls:
        fields["tool_calls"] = [call_fields(call) for call in message.tool_calls]
    return fields


def call_fields(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}

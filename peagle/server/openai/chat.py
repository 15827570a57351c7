"""/v1/chat/completions."""

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from peagle.server.front.engine_backend import EngineBackend, engine_backend_of
from peagle.server.http.limits import validate_body
from peagle.server.http.schema import ChatRequest
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.openai.chat_answer import start_chat
from peagle.server.openai.choice import Choice
from peagle.server.openai.logprobs import chat_logprobs
from peagle.server.openai.reply import Reply
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
    layout = ChatLayout(backend.engines.require_text().texts, body.logprobs_count is not None)
    return await Reply(backend, body, chat_answer.answer, layout).response(request)


class ChatLayout:
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self.texts = texts
        self.logprobs = logprobs

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: Choice, piece: "StreamPiece") -> dict[str, Any]:
        logprobs = chat_logprobs(self.texts, piece.logprobs) if self.logprobs else None
        return self._delta(choice, {"content": piece.text}, logprobs)

    def ending(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {}) | {"finish_reason": choice.finish_reason}

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(self.texts, choice.logprobs) if self.logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _delta(
        self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

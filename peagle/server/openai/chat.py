"""/v1/chat/completions."""

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from peagle.server.engines.local_backend import LocalBackend, local_backend_of
from peagle.server.engines.token_text import TokenTexts
from peagle.server.http.limits import validated
from peagle.server.http.logs import request_notes
from peagle.server.http.schema import ChatRequest
from peagle.server.http.sse import unless_gone
from peagle.server.openai.answer import Choice
from peagle.server.openai.logprobs import chat_logprobs
from peagle.server.openai.prompts import chat_ids
from peagle.server.openai.reply import Reply, texts_of
from peagle.server.openai.submit import ask

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


async def chat(request: Request, body: dict[str, Any]) -> Response:
    front = local_backend_of(request)
    asked = validated(ChatRequest, body)
    front.require(asked.model)
    return await unless_gone(request, answered(request, front, asked))


async def answered(request: Request, front: LocalBackend, asked: ChatRequest) -> Response:
    ids = await chat_ids(front, asked.messages, asked.chat_template_kwargs)
    if front.settings.log_prompts:
        request_notes(request.scope)["prompt"] = [message.plain() for message in asked.messages]
    answer = await ask(front, asked, [ids])
    layout = ChatLayout(texts_of(front), asked.top is not None)
    return await Reply.to(request, front, asked, answer, layout).response(request)


class ChatLayout:
    object, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self.texts, self.logprobs = texts, logprobs

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: Choice, piece: "StreamPiece") -> dict[str, Any]:
        told = chat_logprobs(self.texts, piece.logprobs) if self.logprobs else None
        return self._delta(choice, {"content": piece.text}, told)

    def ending(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {}) | {"finish_reason": choice.reason}

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(self.texts, choice.logprobs) if self.logprobs else None,
            "finish_reason": choice.reason,
        }

    def _delta(
        self, choice: Choice, delta: dict[str, Any], told: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": told, "finish_reason": None}

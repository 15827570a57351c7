"""ChatAnswer: the answer to a chat request, parsed into content, reasoning and tool calls.

Every endpoint that answers messages uses it: chat completions, responses and Anthropic's messages
differ in how they write the parts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.cache_salt import derive_salt
from peagle.server.http.logs import request_log_fields
from peagle.server.http.schema import ChatRequest
from peagle.server.openai.answer import Answer
from peagle.server.openai.choice import Choice
from peagle.server.openai.prompts import encode_chat
from peagle.server.openai.submit import submit
from peagle.server.parsing.answer_parser import AnswerParser, PlainParser
from peagle.server.parsing.answer_part import AnswerPart
from peagle.server.parsing.parsed_message import ParsedMessage

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What one piece of a choice adds to its message."""

    choice: Choice
    piece: "StreamPiece"
    parts: list[AnswerPart]


class ChatAnswer:
    def __init__(self, answer: Answer, parsers: list[AnswerParser]) -> None:
        """`parsers`: one for each choice."""
        self.answer = answer
        self.messages = [ParsedMessage() for _ in answer.choices]
        self._parsers = parsers

    async def next(self, single: bool = False) -> ChatPiece | None:
        """The next piece, of any choice; None when all choices have finished."""
        arrived = await self.answer.next(single)
        if arrived is None:
            return None
        choice, piece = arrived
        parser = self._parsers[choice.index]
        parts = parser.push(piece.text)
        if piece.reason is not None:
            parts += parser.finish()
        for part in parts:
            self.messages[choice.index].add(part)
        return ChatPiece(choice, piece, parts)

    async def wait(self) -> None:
        """Wait until all choices have finished."""
        while await self.next(single=True) is not None:
            pass

    def finish_reason(self, choice: Choice) -> str | None:
        """OpenAI's reason: an answer that ends with tool calls has one of its own."""
        if choice.finish_reason == "stop" and self.messages[choice.index].tool_calls:
            return "tool_calls"
        return choice.finish_reason


async def start_chat(request: Request, backend: EngineBackend, body: ChatRequest) -> ChatAnswer:
    """Submit a chat request. The caller closes `answer` in any case."""
    ids = await encode_chat(backend, body.messages, body.chat_template_kwargs)
    if backend.settings.log_prompts:
        messages = [message.for_template() for message in body.messages]
        request_log_fields(request.scope)["prompt"] = messages
    salt = derive_salt(request.scope, body.cache_salt)
    answer = await submit(backend, body, [ids], salt)
    return ChatAnswer(answer, [PlainParser() for _ in answer.choices])

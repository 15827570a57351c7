"""MessageReply: the answer to a request of /v1/messages, whole or streamed."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.anthropic.message_events import Event, MessageEvents, ping
from peagle.server.anthropic.message_object import MessageObject
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import request_log_fields
from peagle.server.http.sse import EventStream, encode_typed_event
from peagle.server.openai.chat_answer import ChatAnswer, ChatPiece
from peagle.server.openai.reply import step_trace
from peagle.server.openai.usage import speculative_metrics
from peagle.server.translation.answer_blocks import AnswerBlocks, BlockEvent
from peagle.server.translation.patient_pieces import patient_pieces


class MessageReply:
    def __init__(self, message: MessageObject, chat_answer: ChatAnswer) -> None:
        self.message = message
        self.chat_answer = chat_answer
        self.choice = chat_answer.answer.choices[0]
        self.blocks = AnswerBlocks()
        self.events = MessageEvents(message)
        extension = message.request.peagle
        self.trace = bool(extension and extension.trace)

    async def response(self, request: Request) -> Response:
        async def close() -> None:
            self.close(request)

        if self.message.request.stream:
            timeout = self.chat_answer.answer.backend.settings.timeout
            return EventStream(self.encode(), close, timeout, encode_stream_error)
        try:
            while (piece := await self.chat_answer.next(single=True)) is not None:
                self._push(piece)
            return JSONResponse(self._whole())
        finally:
            self.close(request)

    async def encode(self) -> AsyncIterator[bytes]:
        """The events of the stream. The first token tells how much of the prompt was cached."""
        has_begun = False
        async for piece in patient_pieces(self.chat_answer, self.trace):
            if piece is None:
                yield encode_typed_event(ping())
                continue
            if not has_begun:
                has_begun = True
                for event in self.events.opening(self.choice):
                    yield encode_typed_event(event)
            for event in self._with_trace(piece, self._events(self._push(piece))):
                yield encode_typed_event(event)
        for event in self._events(self.blocks.finish()):
            yield encode_typed_event(event)
        for event in self.events.ending(self.choice, self.blocks.blocks):
            yield encode_typed_event(event)

    def close(self, request: Request) -> None:
        answer = self.chat_answer.answer
        answer.close()
        request_log_fields(request.scope).update(answer.log_fields())

    def _push(self, piece: ChatPiece) -> list[BlockEvent]:
        return [event for part in piece.parts for event in self.blocks.push(part)]

    def _events(self, block_events: list[BlockEvent]) -> list[Event]:
        return [event for block in block_events for event in self.events.of_block(block)]

    def _with_trace(self, piece: ChatPiece, events: list[Event]) -> list[Event]:
        """Add what the step drafted to its last event; a step without events gets a ping."""
        trace = step_trace(self.chat_answer.answer, piece.piece) if self.trace else None
        if trace is None:
            return events
        events = events or [ping()]
        events[-1]["peagle"] = trace
        return events

    def _whole(self) -> dict[str, Any]:
        self.blocks.finish()
        body = self.message.finished_body(self.choice, self.blocks.blocks)
        return body | {"metrics": {"speculative_decoding": speculative_metrics([self.choice])}}


def encode_stream_error(error: ApiError) -> bytes:
    return encode_typed_event(error.anthropic_body)

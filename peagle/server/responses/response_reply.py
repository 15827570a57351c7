"""ResponseReply: the answer to a request of /v1/responses, whole or streamed."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.http.errors import ApiError
from peagle.server.http.logs import request_log_fields
from peagle.server.http.sse import EventStream, encode_typed_event
from peagle.server.openai.chat_answer import ChatAnswer, ChatPiece
from peagle.server.openai.reply import step_trace
from peagle.server.responses.response_events import Event, ResponseEvents
from peagle.server.responses.response_object import ResponseObject
from peagle.server.translation.answer_blocks import AnswerBlock, AnswerBlocks, BlockEvent
from peagle.server.translation.patient_pieces import patient_pieces

COMMENT = b": the answer is being generated\n\n"  # Clients skip comments.
OnFinished = Callable[[dict[str, Any], list[AnswerBlock]], None]


class ResponseReply:
    def __init__(
        self, response: ResponseObject, chat_answer: ChatAnswer, on_finished: OnFinished
    ) -> None:
        """`on_finished` is called with the finished response and its blocks."""
        self.response_object = response
        self.chat_answer = chat_answer
        self.on_finished = on_finished
        self.blocks = AnswerBlocks()
        self.events = ResponseEvents(response)
        extension = response.request.peagle
        self.trace = bool(extension and extension.trace)

    async def response(self, request: Request) -> Response:
        async def close() -> None:
            self.close(request)

        if self.response_object.request.stream:
            timeout = self.chat_answer.answer.backend.settings.timeout
            return EventStream(self.encode(), close, timeout, self.encode_error)
        try:
            while (piece := await self.chat_answer.next(single=True)) is not None:
                self._push(piece)
            return JSONResponse(self._finish())
        finally:
            self.close(request)

    async def encode(self) -> AsyncIterator[bytes]:
        """The events of the stream."""
        for event in self.events.opening():
            yield encode_typed_event(event)
        async for piece in patient_pieces(self.chat_answer, self.trace):
            if piece is None:
                yield COMMENT
                continue
            for event in self._with_trace(piece, self._events(self._push(piece))):
                yield encode_typed_event(event)
        if self.chat_answer.answer.choices[0].finish_reason == "length":
            self.events.item_status = "incomplete"
        for event in self._events(self.blocks.finish()):
            yield encode_typed_event(event)
        yield encode_typed_event(self.events.finished(self._finish()))

    def encode_error(self, error: ApiError) -> bytes:
        return b"".join(map(encode_typed_event, self.events.failed(error)))

    def close(self, request: Request) -> None:
        answer = self.chat_answer.answer
        answer.close()
        request_log_fields(request.scope).update(answer.log_fields())

    def _push(self, piece: ChatPiece) -> list[BlockEvent]:
        return [event for part in piece.parts for event in self.blocks.push(part)]

    def _events(self, block_events: list[BlockEvent]) -> list[Event]:
        return [event for block in block_events for event in self.events.of_block(block)]

    def _with_trace(self, piece: ChatPiece, events: list[Event]) -> list[Event]:
        """Add what the step drafted to its last event; a step without events gets one."""
        trace = step_trace(self.chat_answer.answer, piece.piece) if self.trace else None
        if trace is None:
            return events
        if not events:
            is_open = self.blocks.is_open
            block = self.blocks.blocks[-1] if is_open else None
            events = [self.events.in_progress() if block is None else self.events.delta(block, "")]
        events[-1]["peagle"] = trace
        return events

    def _finish(self) -> dict[str, Any]:
        self.blocks.finish()
        choice = self.chat_answer.answer.choices[0]
        blocks = self.blocks.blocks
        body = self.response_object.finished_body(choice, blocks)
        self.on_finished(body, blocks)
        return body

"""Reply: the response to a chat or completion request, whole or streamed."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.logs import request_id, request_log_fields
from peagle.server.http.schema import GenerationRequest
from peagle.server.http.sse import DONE_EVENT, EventStream, encode_event
from peagle.server.openai.answer import Answer
from peagle.server.openai.choice import Choice
from peagle.server.openai.usage import speculative_metrics, token_usage

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


class Layout(Protocol):
    """How an endpoint writes its choices."""

    object_type: str  # The field `object` of a whole response.
    chunk_type: str  # The field `object` of a chunk.
    id_prefix: str

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk of a choice before its first token; None: there is none."""

    def pieces(self, choice: Choice, piece: "StreamPiece") -> list[dict[str, Any]]:
        """The chunks of a piece; none: its text is held back, or there is none."""

    def empty(self, choice: Choice) -> dict[str, Any]:
        """A chunk without text, for the trace of a step."""

    def ending(self, choice: Choice) -> dict[str, Any]: ...

    def whole(self, choice: Choice) -> dict[str, Any]: ...


@dataclass(slots=True)
class Reply:
    backend: EngineBackend
    body: GenerationRequest
    answer: Answer
    layout: Layout

    async def response(self, request: Request) -> Response:
        header = {
            "id": f"{self.layout.id_prefix}-{request_id(request.scope)}",
            "created": int(time.time()),
            "model": self.body.model or self.backend.model_name,
        }
        if self.body.stream:
            chunks = ChunkStream(self.body, self.answer, self.layout, header)
            timeout = self.backend.settings.timeout
            return EventStream(
                chunks.encode(), lambda: self._close(request), timeout, ends_with_done=True
            )
        try:
            await self.answer.wait()
            return JSONResponse(header | self._whole())
        finally:
            await self._close(request)

    def _whole(self) -> dict[str, Any]:
        choices = self.answer.choices
        return {
            "object": self.layout.object_type,
            "choices": [self.layout.whole(choice) for choice in choices],
            "usage": token_usage(choices),
            "metrics": {"speculative_decoding": speculative_metrics(choices)},
        }

    async def _close(self, request: Request) -> None:
        self.answer.close()
        request_log_fields(request.scope).update(self.answer.log_fields())


class ChunkStream:
    """The chunks of a streamed response, in order.

    The opening of each choice; pieces; the ending of each choice; usage, if it is asked for.
    """

    def __init__(
        self, body: GenerationRequest, answer: Answer, layout: Layout, header: dict[str, Any]
    ) -> None:
        self.answer = answer
        self.layout = layout
        self.header = header
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.trace = bool(body.peagle and body.peagle.trace)
        self._unfinished = len(answer.choices)

    async def encode(self) -> AsyncIterator[bytes]:
        """The chunks as server-sent events; those that come at once are sent at once."""
        async for chunks in self.groups():
            data = b"".join(map(encode_event, chunks))
            yield data + DONE_EVENT if self.answer.is_finished else data

    async def groups(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Chunks between which nothing is waited for; none of the groups but the last is empty."""
        # Nothing is sent before the first token: clients take the first chunk for it.
        arrived = await self.answer.next(single=self.trace)
        openings = [self.layout.opening(choice) for choice in self.answer.choices]
        group = [self._chunk(opening) for opening in openings if opening is not None]
        group += [self._ending(choice) for choice in self.answer.choices if choice.stream is None]
        while arrived is not None:
            group += self._chunks_of(*arrived)
            if self.answer.is_finished:
                break
            if group:
                yield group
            arrived = await self.answer.next(single=self.trace)
            group = []
        if self.include_usage:
            usage = {"usage": token_usage(self.answer.choices)}
            group.append(self._chunk() | usage | self._metrics())
        yield group

    def _chunks_of(self, choice: Choice, piece: "StreamPiece") -> Iterator[dict[str, Any]]:
        pieces = self.layout.pieces(choice, piece)
        if self.trace and piece.step is not None:
            pieces = pieces or [self.layout.empty(choice)]
            yield self._chunk(pieces.pop(0)) | self._trace(piece)
        for chunk in pieces:
            yield self._chunk(chunk)
        if piece.reason is not None:
            yield self._ending(choice)

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = self.header | {"object": self.layout.chunk_type, "choices": list(choices)}
        if self.include_usage:
            usage = token_usage(self.answer.choices) if self.continuous_usage else None
            chunk["usage"] = usage
        return chunk

    def _ending(self, choice: Choice) -> dict[str, Any]:
        """The last chunk of a choice. The last chunk of the stream has the metrics."""
        self._unfinished -= 1
        chunk = self._chunk(self.layout.ending(choice))
        last = not self._unfinished and not self.include_usage
        return chunk | self._metrics() if last else chunk

    def _trace(self, piece: "StreamPiece") -> dict[str, Any]:
        """The field `peagle` of a chunk."""
        trace = step_trace(self.answer, piece) if self.trace else None
        return {} if trace is None else {"peagle": trace}

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": speculative_metrics(self.answer.choices)}}


def step_trace(answer: Answer, piece: "StreamPiece") -> dict[str, Any] | None:
    """The field `peagle` of an event: what a step drafted; None: the piece has no tokens."""
    step = piece.step
    if step is None:
        return None
    texts = answer.backend.engines.require_text().texts
    return {
        "accepted": min(step.accepted, len(step.tokens)),
        "drafted": step.drafted,
        "tokens": len(step.tokens),
        "k": answer.slot.k,
        "texts": [texts.text(token) for token in step.tokens],
    }

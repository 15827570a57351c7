"""What chat and completions share of their replies: whole or streamed, usage, metrics, trace."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.engines.local_backend import LocalBackend
from peagle.server.engines.token_text import TokenTexts
from peagle.server.http.logs import request_id, request_notes
from peagle.server.http.schema import GenerationRequest
from peagle.server.http.sse import DONE, EventStream, event
from peagle.server.openai.answer import Answer, Choice

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


class Layout(Protocol):
    """How one endpoint writes choices."""

    object: str  # of a whole answer
    chunk: str  # of a piece
    prefix: str  # of ids

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token; None: nothing."""

    def piece(self, choice: Choice, piece: "StreamPiece") -> dict[str, Any]: ...

    def ending(self, choice: Choice) -> dict[str, Any]: ...

    def whole(self, choice: Choice) -> dict[str, Any]: ...


@dataclass(slots=True)
class Reply:
    front: LocalBackend
    body: GenerationRequest
    answer: Answer
    layout: Layout
    head: dict[str, Any]

    @classmethod
    def to(
        cls,
        request: Request,
        front: LocalBackend,
        body: GenerationRequest,
        answer: Answer,
        layout: Layout,
    ) -> "Reply":
        head = {"id": f"{layout.prefix}-{request_id(request.scope)}", "created": int(time.time())}
        return cls(front, body, answer, layout, head | {"model": body.model or front.model})

    async def response(self, request: Request) -> Response:
        if self.body.stream:
            return EventStream(
                self._sent(), lambda: self._close(request), self.front.settings.timeout
            )
        try:
            await self.answer.whole()
            return JSONResponse(self.whole())
        finally:
            await self._close(request)

    def whole(self) -> dict[str, Any]:
        choices = [self.layout.whole(choice) for choice in self.answer.choices]
        said = {"object": self.layout.object, "choices": choices, "usage": self.answer.usage}
        return self.head | said | self._metrics()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        options = self.body.stream_options
        wants_usage = bool(options and options.include_usage)
        always = bool(options and options.continuous_usage_stats)
        for choice in self.answer.choices:
            if (opening := self.layout.opening(choice)) is not None:
                yield self._chunk([opening], wants_usage, always)
        left = len(self.answer.choices)
        for choice in self.answer.choices:
            if choice.stream is None:
                left -= 1
                yield self._chunk([self.layout.ending(choice)], wants_usage, always, last=not left)
        while (news := await self.answer.next(self._traces)) is not None:
            choice, piece = news
            if piece.step is not None and (piece.text or piece.logprobs or self._traces):
                yield self._chunk(
                    [self.layout.piece(choice, piece)], wants_usage, always
                ) | self._trace(piece)
            if piece.reason is not None:
                left -= 1
                yield self._chunk([self.layout.ending(choice)], wants_usage, always, last=not left)
        if wants_usage:
            yield (
                self._chunk([], wants_usage, always)
                | {"usage": self.answer.usage}
                | self._metrics()
            )

    async def _sent(self) -> AsyncIterator[bytes]:
        async for data in self.events():
            yield event(data)
        yield DONE

    @property
    def _traces(self) -> bool:
        return bool(self.body.peagle and self.body.peagle.trace)

    def _chunk(
        self, choices: list[Any], usage: bool, always: bool, last: bool = False
    ) -> dict[str, Any]:
        """`last`: of the choices; without usage to come it is the last chunk of all."""
        chunk = self.head | {"object": self.layout.chunk, "choices": choices}
        if usage:
            chunk["usage"] = self.answer.usage if always else None
        return chunk | (self._metrics() if last and not usage else {})

    def _trace(self, piece: "StreamPiece") -> dict[str, Any]:
        if not self._traces or piece.step is None:
            return {}
        step, texts = piece.step, self.front.engines.texts
        told = {
            "accepted": min(step.accepted, len(step.tokens)),
            "drafted": step.drafted,
            "tokens": len(step.tokens),
        }
        shown = [texts.text(token) for token in step.tokens] if texts is not None else []
        return {"peagle": told | {"k": self.answer.slot.engine.metrics.k, "texts": shown}}

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": self.answer.speculation}}

    async def _close(self, request: Request) -> None:
        self.answer.close()
        request_notes(request.scope).update(self.answer.notes())


def texts_of(front: LocalBackend) -> TokenTexts:
    assert front.engines.texts is not None
    return front.engines.texts

"""FrontRequest: a request in the front, and the text of its answer.

The same as in engine/output_processor.py: a stop string may lie inside an accepted block, and ends
the answer there; the text of a stop token is hidden unless the request includes it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.core import Step
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.http.errors import ApiError
from peagle.server.messages import Add, LogprobEntry, Output

if TYPE_CHECKING:
    from peagle.engine.detokenizer import Detokenizer
    from peagle.engine.stream import Stream, StreamPiece, TokenLogprob


@dataclass(slots=True, eq=False)
class FrontRequest:
    add: Add  # Sent again to a fresh process if the answer has not begun.
    stream: "Stream"
    timing: RequestTiming
    detokenizer: "Detokenizer"
    stop_ids: frozenset[int]
    accepted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    has_tokens: bool = False
    retries: int = 0  # Processes that ended while the request waited.
    sent_at: float = 0.0  # To the process that has it now, by the monotonic clock.

    def take(self, output: Output) -> bool:
        """Pass an output on to the stream; return whether a stop string ended the answer."""
        from peagle.engine.stream import StreamPiece

        reason = output.reason
        stopped = False
        if output.tokens:
            if not self.has_tokens:
                self.stream.cached_tokens = output.cached_tokens
            self.has_tokens = True
            if output.queued is not None:
                self.timing.admitted = self.sent_at + output.queued
            piece, stopped = self._piece(output)
            self.stream.put(piece)
        if stopped:
            reason = "stop"
        if reason is not None:
            end = StreamPiece(
                None,
                reason=reason,  # type: ignore[arg-type]
                error=output.error,
                stop_string=self.detokenizer.stop_string,
            )
            self.stream.put(end)
        return stopped

    def _piece(self, output: Output) -> "tuple[StreamPiece, bool]":
        from peagle.engine.stream import StreamPiece

        tokens = output.tokens
        shown = tokens
        if not self.detokenizer.include_stop and tokens[-1] in self.stop_ids:
            shown = tokens[:-1]
        pushed = self.detokenizer.push(shown)
        text = pushed.text
        if pushed.stopped:
            tokens = tokens[: pushed.tokens_used]
        elif output.reason in ("stop", "length"):
            text += self.detokenizer.finish()
        logprobs = tuple(map(token_logprob, (output.logprobs or [])[: len(tokens)]))
        step = Step(tuple(tokens), output.drafted, output.accepted)
        return StreamPiece(step, text, logprobs), pushed.stopped

    def refuse(self, error: ApiError) -> None:
        """End the request with an error; as one of its answer if it was accepted before."""
        from peagle.engine.stream import StreamPiece

        if self.accepted.done():
            self.stream.put(StreamPiece(None, reason="error", error=error.message))
        else:
            self.accepted.set_exception(error)


def token_logprob(entry: LogprobEntry) -> "TokenLogprob":
    from peagle.engine.stream import TokenLogprob

    return TokenLogprob(*entry)

"""Front: a web server that an engine process answers, and what it has under way here."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.server.engines.engine_slot import EngineSlot, RequestTiming
from peagle.server.messages import Output, Refusal, WorkerBatch

if TYPE_CHECKING:
    from peagle.engine.stream import Stream


@dataclass(slots=True, eq=False)
class WorkerRequest:
    slot: EngineSlot
    stream: "Stream"
    timing: RequestTiming
    sent: bool = False  # Whether tokens were sent.
    on_answered: Callable[[], None] = lambda: None  # Called when it ends with an answer.


@dataclass(slots=True, eq=False)
class Front:
    identity: bytes
    requests: dict[int, WorkerRequest] = field(default_factory=dict)
    preparing: set[int] = field(default_factory=set)  # Requests whose grammar is compiled.
    leases: dict[int, EngineSlot] = field(default_factory=dict)
    jobs: dict[int, "Future[Any]"] = field(default_factory=dict)  # Builds and scorings by call.
    batch: WorkerBatch = field(default_factory=WorkerBatch)
    last_heard: float = field(default_factory=time.monotonic)

    @property
    def has_news(self) -> bool:
        batch = self.batch
        return bool(batch.outputs or batch.accepted or batch.refusals or batch.results)

    @property
    def cannot_wait(self) -> bool:
        """Whether the next message is due now, and not after the next step.

        A front prepares its response to an accepted request while the engine reads the prompt.
        """
        batch = self.batch
        return bool(batch.accepted or batch.refusals or batch.results or batch.status)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.preparing or self.jobs)

    def take_batch(self) -> WorkerBatch:
        """The next message to this front. Requests whose end is in it are forgotten."""
        batch = self.batch
        self.batch = WorkerBatch()
        for output in batch.outputs:
            request = self.requests.get(output.id)
            if request is None:
                continue
            if output.tokens and not request.sent:
                request.sent = True
                output.cached_tokens = request.stream.cached_tokens or 0
                if request.timing.admitted is not None:
                    output.queued = max(0.0, request.timing.admitted - request.timing.arrival)
            if output.reason is not None:
                del self.requests[output.id]
        return batch

    def add_errors(self, error: str) -> None:
        """Add an error for every request and call to the next message."""
        for request_id in self.requests:
            self.batch.outputs.append(Output(request_id, reason="error", error=error))
        for request_id in (*self.preparing, *self.jobs):
            self.batch.refusals.append(Refusal(request_id, 503, error))

    def drop_errors(self) -> None:
        """Forget the ends of requests that failed with their engine: fronts ask again."""
        for output in self.batch.outputs:
            if output.reason == "error":
                output.reason = None
                output.error = None
        self.batch.outputs = [
            output for output in self.batch.outputs if output.tokens or output.reason
        ]

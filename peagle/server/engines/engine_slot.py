"""EngineSlot: one engine of the server, and what the server knows about it."""

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from peagle.server.engines.generation_params import GenerationParams

if TYPE_CHECKING:
    from peagle.engine import Engine
    from peagle.engine.stream import Stream


@dataclass(slots=True)
class RequestTiming:
    """Monotonic times in seconds: when a request arrived, and when its engine admitted it."""

    arrival: float
    admitted: float | None = None


@dataclass(slots=True, eq=False)
class EngineSlot:
    name: str
    engine: "Engine"
    # Requests, by id, that wait for their first step.
    pending: dict[str, RequestTiming] = field(default_factory=dict)
    last_used: float = field(default_factory=time.monotonic)
    # HTTP requests that are being prepared for this engine. It must not be closed meanwhile.
    preparing: int = 0

    @property
    def busy(self) -> bool:
        return self.engine.busy

    @property
    def has_answered(self) -> bool:
        """Whether the engine has completed an answer."""
        finished = self.engine.metrics.finished
        return bool(finished["stop"] or finished["length"])

    def add(
        self, request_id: str, ids: list[int], params: GenerationParams
    ) -> "tuple[Stream, RequestTiming]":
        """Queue a request in the engine, which raises UserError if it refuses."""
        timing = RequestTiming(time.monotonic())
        stream = self.engine.add(
            ids,
            id=request_id,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop=params.stop,
            stop_ids=params.stop_ids,
            ignore_eos=params.ignore_eos,
            include_stop=params.include_stop,
            logprobs=params.logprobs,
            grammar=params.grammar,
            user=params.user,
            cache_salt=params.cache_salt,
            **asdict(params.sampling),
        )
        self.pending[request_id] = timing
        return stream, timing

    def mark_admitted(self, step_start: float) -> None:
        """Record the admission of requests that left the queue in the step begun at that time."""
        for request_id in list(self.pending):
            if not self.engine.is_waiting(request_id):
                self.pending.pop(request_id).admitted = step_start

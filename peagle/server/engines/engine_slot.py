"""EngineSlot: one engine of the server, and what the server knows about it."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.server.messages import Add

if TYPE_CHECKING:
    from peagle.engine import Engine
    from peagle.engine.stream import Stream
    from peagle.grammar import CompiledGrammar


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

    def add(
        self, request_id: str, add: Add, grammar: "CompiledGrammar | None"
    ) -> "tuple[Stream, RequestTiming]":
        """Queue a request in the engine, which raises UserError if it refuses.

        Text and stop strings are the front's work.
        """
        timing = RequestTiming(time.monotonic())
        stream = self.engine.add(
            add.prompt,
            id=request_id,
            max_tokens=add.max_tokens,
            min_tokens=add.min_tokens,
            stop_ids=frozenset(add.stop_ids),
            ignore_eos=add.ignore_eos,
            logprobs=add.logprobs,
            grammar=grammar,
            user=add.user,
            cache_salt=add.cache_salt,
            thinking=add.thinking,
            detokenize=False,
            **add.sampling,
        )
        self.pending[request_id] = timing
        return stream, timing

    def mark_admitted(self, step_start: float) -> None:
        """Record the admission of requests that left the queue in the step begun at that time."""
        for request_id in list(self.pending):
            if not self.engine.is_waiting(request_id):
                self.pending.pop(request_id).admitted = step_start

"""CallHandler: the calls of fronts: opening engines and scoring prompts."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.http.errors import ApiError
from peagle.server.messages import Call, CallResult, EngineInfo, EngineKey
from peagle.server.worker.engine_builds import EngineBuilds
from peagle.server.worker.fronts import Front
from peagle.server.worker.refusal import refusal_of
from peagle.server.worker.requests import logprob_entry

if TYPE_CHECKING:
    from peagle.engine.stream import TokenLogprob


class CallHandler:
    def __init__(self, pool: EnginePool, builds: EngineBuilds) -> None:
        self.pool = pool
        self.builds = builds

    def call(self, front: Front, call: Call) -> None:
        try:
            if call.kind == "open":
                self._open(front, call.id, call.engine)
            else:
                self._score(front, call)
        except Exception as error:
            front.batch.refusals.append(refusal_of(call.id, error))

    def end(self, front: Front, call_id: int) -> None:
        """Cancel a call, or give back its lease."""
        slot = front.leases.pop(call_id, None)
        if slot is not None:
            slot.preparing -= 1
        job = front.jobs.pop(call_id, None)
        # A client that leaves does not cancel a build for others.
        if job is not None and job not in self.builds:
            job.cancel()

    def end_all(self, front: Front) -> None:
        for call_id in [*front.leases, *front.jobs]:
            self.end(front, call_id)

    def _open(self, front: Front, call_id: int, key: EngineKey) -> None:
        slot = self.pool.find(key)
        if slot is not None:
            self._lease(front, call_id, slot)
            return

        def built(done: "Future[EngineSlot]") -> None:
            finish_call(front, call_id, done, partial(self._lease, front, call_id))

        front.jobs[call_id] = self.builds.start(key, built)

    def _lease(self, front: Front, call_id: int, slot: EngineSlot) -> None:
        """Keep an engine open while a request is prepared for it."""
        slot.preparing += 1
        slot.last_used = time.monotonic()
        front.leases[call_id] = slot
        front.batch.results.append(CallResult(call_id, engine=engine_info(slot)))

    def _score(self, front: Front, call: Call) -> None:
        # It imports torch. At a start, `load_pair` does, and prepares the GPU at the same time.
        from peagle.server.engines.prompt_logprobs import score_prompt

        target = self.pool.require_ready().target
        self._check_queue()
        parts = score_prompt(target, call.prompt, call.top)
        job = self.pool.driver.submit_long(parts, len(call.prompt))
        front.jobs[call.id] = job

        def scored(scores: "list[TokenLogprob]") -> None:
            entries = [logprob_entry(entry) for entry in scores]
            front.batch.results.append(CallResult(call.id, scores=entries))

        job.add_done_callback(lambda done: finish_call(front, call.id, done, scored))

    def _check_queue(self) -> None:
        """Scorings take places in the queue."""
        main = self.pool.main
        waiting = self.pool.driver.long_jobs + (main.engine.waiting_requests if main else 0)
        if waiting >= self.pool.settings.max_queue:
            message = (
                f"{waiting} requests are already waiting, and the queue holds"
                f" {self.pool.settings.max_queue}: try again later"
            )
            raise ApiError(429, message, retry_after=1)


def finish_call(
    front: Front, call_id: int, done: "Future[Any]", take: Callable[[Any], None]
) -> None:
    if front.jobs.pop(call_id, None) is None or done.cancelled():
        return  # The call has ended.
    error = done.exception()
    if error is not None:
        front.batch.refusals.append(refusal_of(call_id, error))
    else:
        take(done.result())


def engine_info(slot: EngineSlot) -> EngineInfo:
    return EngineInfo(slot.name, slot.engine.context, slot.engine.vocab_size)

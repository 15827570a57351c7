"""EngineConnection: one engine process as a front sees it, and the requests that it answers.

When the process ends, requests that have tokens end with an error. The others are given back, and
another process gets them, once: a request that ends two processes is not tried on a third.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from peagle.server.engine_process.engine_link import EngineLink
from peagle.server.front.front_request import FrontRequest
from peagle.server.http.errors import INTERNAL_ERROR, ApiError, engine_stopped
from peagle.server.http.logs import log_event
from peagle.server.messages import (
    Abort,
    Call,
    CallResult,
    EngineState,
    FrontBatch,
    Output,
    Refusal,
    TargetInfo,
    WorkerBatch,
    WorkerStatus,
)

MAX_RETRIES = 1  # Of a request whose process ended before the answer began.


class EngineConnection:
    def __init__(self, name: str, on_target: Callable[[TargetInfo], None]) -> None:
        """`on_target` is called with every status of a process that has loaded its pair."""
        self.name = name
        self.state = EngineState(name, "", running=False)
        self.link: EngineLink | None = None
        self.status = WorkerStatus()
        self.requests: dict[int, FrontRequest] = {}
        self.last_heard = 0.0
        self._on_target = on_target
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._status_waiters: list[asyncio.Future[None]] = []

    @property
    def ready(self) -> bool:
        return self.link is not None and self.status.target is not None

    @property
    def load(self) -> int:
        """Requests in the process: of this front now, and of others as of the last status."""
        own = len(self.requests)
        engines = self.status.engines.values()
        return max(own, sum(engine["running"] + engine["waiting"] for engine in engines))

    def report(self) -> dict[str, Any]:
        """The process in /v1/peagle/status."""
        state = "ready" if self.ready else "starting" if self.link is not None else "down"
        return {
            "name": self.name,
            "state": state,
            "restarts": self.state.restarts,
            "in_flight": len(self.requests),
            "pid": self.status.pid or None,
        }

    # --- the life of the process ------------------------------------------------------------------

    def update(self, state: EngineState) -> list[FrontRequest]:
        """Follow the supervisor. Returns requests of a process that has ended, to be sent again."""
        returned: list[FrontRequest] = []
        if self.link is not None and (state.address != self.state.address or not state.running):
            returned = self.disconnect()
        self.state = state
        if state.running and self.link is None:
            self.link = EngineLink(state.address, self._receive)
        return returned

    def disconnect(self) -> list[FrontRequest]:
        assert self.link is not None
        self.link.close()
        self.link = None
        self._set_status(WorkerStatus())  # Nobody waits for a status of a process that has ended.
        for call in self._calls.values():
            if not call.done():
                call.set_exception(engine_stopped())
        self._calls.clear()
        returned: list[FrontRequest] = []
        for request in self.requests.values():
            if request.has_tokens or request.retries >= MAX_RETRIES:
                request.refuse(engine_stopped())
            else:
                request.retries += 1
                returned.append(request)
        self.requests.clear()
        return returned

    # --- requests and calls -----------------------------------------------------------------------

    def send(self, request: FrontRequest) -> None:
        request.sent_at = time.monotonic()
        self.requests[request.add.id] = request
        self.batch.adds.append(request.add)

    def abort(self, request_id: int) -> bool:
        """Returns whether the request was here."""
        if self.requests.pop(request_id, None) is None:
            return False
        self.batch.aborts.append(Abort(request_id))
        return True

    def refuse_pending(self, error: ApiError) -> None:
        """Refuse all calls, and the requests that the process has not accepted yet."""
        for request in list(self.requests.values()):
            if not request.accepted.done():
                self.abort(request.add.id)
                request.refuse(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    async def call(self, call: Call) -> CallResult:
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls[call.id] = future
        self.batch.calls.append(call)
        try:
            return await future
        except asyncio.CancelledError:
            if call.id in self._calls:
                self.end_call(call.id)
            raise
        finally:
            self._calls.pop(call.id, None)

    def end_call(self, call_id: int) -> None:
        if self.link is not None:
            self.batch.ended_calls.append(call_id)

    async def refresh(self, seconds: float) -> None:
        """Wait for a new status, but not for a process that is busy with a long step."""
        if not self.ready:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._status_waiters.append(waiter)
        self.batch.wants_status = True
        await asyncio.wait({waiter}, timeout=seconds)

    @property
    def batch(self) -> FrontBatch:
        assert self.link is not None, "the process has ended"
        return self.link.batch()

    # --- what arrives -----------------------------------------------------------------------------

    def _receive(self, batch: WorkerBatch) -> None:
        self.last_heard = time.monotonic()
        for request_id in batch.accepted:
            request = self.requests.get(request_id)
            if request is not None and not request.accepted.done():
                request.accepted.set_result(None)
        for output in batch.outputs:
            request = self.requests.get(output.id)
            if request is not None:  # Else it was aborted here.
                self._take_output(request, output)
        for refusal in batch.refusals:
            self._refuse(refusal)
        for result in batch.results:
            call = self._calls.pop(result.id, None)
            if call is not None and not call.done():
                call.set_result(result)
        if batch.status is not None:
            self._take_status(batch.status)

    def _take_output(self, request: FrontRequest, output: Output) -> None:
        try:
            stopped = request.take(output)
        except Exception as error:  # The other answers of this message go on.
            log_event("error", logging.ERROR, error)
            request.refuse(ApiError(500, INTERNAL_ERROR))
            self.abort(output.id)
            return
        if stopped or output.reason is not None:
            del self.requests[output.id]
        if stopped and output.reason is None:
            self.batch.aborts.append(Abort(output.id, "stop"))

    def _refuse(self, refusal: Refusal) -> None:
        error = ApiError(refusal.status, refusal.message, retry_after=refusal.retry_after)
        request = self.requests.pop(refusal.id, None)
        if request is not None:
            request.refuse(error)
            return
        call = self._calls.pop(refusal.id, None)
        if call is not None and not call.done():
            call.set_exception(error)

    def _take_status(self, status: WorkerStatus) -> None:
        self._set_status(status)
        if status.target is not None:
            self._on_target(status.target)

    def _set_status(self, status: WorkerStatus) -> None:
        self.status = status
        for waiter in self._status_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._status_waiters.clear()

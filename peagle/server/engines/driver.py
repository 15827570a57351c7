"""Driver: the thread that steps the engines.

Each round runs one job, one part of a long job, and one step of every engine; a round without work
captures one CUDA graph that the start has left for later. The engines share their target, so their
passes must take turns. Extra engines are built on another thread (extra_engines.py), so that nobody
waits for them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from peagle.server.engines.engine_slot import EngineSlot

T = TypeVar("T")
STOP_SECONDS = 5.0  # Time for a pass or a download to end when the driver stops.
IDLE_SECONDS = 1.0  # An idle driver looks for work this often even if it is not woken.
# Tokens of the long jobs that are under way at once: each holds a KV cache of its own, outside the
# pages of the engines. A longer job runs alone.
MAX_LONG_JOB_TOKENS = 1 << 13


@dataclass(slots=True, eq=False)
class LongJob:
    future: Future[Any]
    parts: Generator[None, None, Any]
    tokens: int


class Driver:
    def __init__(
        self,
        on_engine_failure: Callable[[EngineSlot, Exception], None],
        on_job_failure: Callable[[Exception], object],
    ) -> None:
        """Both are called on this thread: after an error of an engine's step, or of a job."""
        self.on_engine_failure = on_engine_failure
        self.on_job_failure = on_job_failure
        self.slots: list[EngineSlot] = []  # Only the driver's thread changes this list.
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._waiting: deque[LongJob] = deque()
        self._started: deque[LongJob] = deque()
        self._wake = threading.Event()
        self._on_round: Callable[[], object] = lambda: None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="peagle-driver", daemon=True)

    def attach(self, wake: threading.Event, on_round: Callable[[], object]) -> None:
        """Wait with `wake`, and call `on_round` at the beginning of every round."""
        self._wake = wake
        self._on_round = on_round

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def long_jobs(self) -> int:
        return len(self._waiting) + len(self._started)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on this thread, between two steps."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        self._wake.set()
        return future

    def submit_long(self, parts: Generator[None, None, T], tokens: int) -> Future[T]:
        """Run a long job, one part between two steps. Canceling the future stops it.

        `tokens`: the size of the KV cache that it holds from its first part on.
        """
        future: Future[T] = Future()
        self._waiting.append(LongJob(future, parts, tokens))
        self._wake.set()
        return future

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()  # Before looking for work, so that no wake-up is lost.
            self._on_round()
            worked = self._run_job()
            worked |= self._run_part()
            for slot in list(self.slots):
                worked |= self._step(slot)
            worked = worked or self._capture_next()
            if not worked and not self._stopped:
                self._wake.wait(IDLE_SECONDS)

    def _run_job(self) -> bool:
        try:
            future, job = self._jobs.get_nowait()
        except Empty:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except Exception as error:
                self.on_job_failure(error)  # First: it may end the process, with a clear error.
                future.set_exception(error)
        del future, job  # The error's traceback holds this frame: it must not hold the future.
        return True

    def _run_part(self) -> bool:
        self._start_long_jobs()
        if not self._started:
            return False
        job = self._started[0]
        if self._job_continues(job):
            self._started.rotate(-1)  # Long jobs take turns.
        else:
            self._started.popleft()
        return True

    def _job_continues(self, job: LongJob) -> bool:
        """Run the next part of a job. Returns False after the last one."""
        if job.future.cancelled():
            job.parts.close()
            return False
        try:
            next(job.parts)
            return True
        except StopIteration as end:
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(end.value)
        except Exception as error:
            self.on_job_failure(error)  # As above.
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        del job  # As above.
        return False

    def _start_long_jobs(self) -> None:
        """Start waiting jobs in their order while their KV caches are small enough together."""
        for job in list(self._waiting):
            if job.future.cancelled():
                self._waiting.remove(job)
        tokens = sum(job.tokens for job in self._started)
        while self._waiting:
            tokens += self._waiting[0].tokens
            if self._started and tokens > MAX_LONG_JOB_TOKENS:
                return
            self._started.append(self._waiting.popleft())

    def _capture_next(self) -> bool:
        """Capture a CUDA graph that the start has left, while no engine has work."""
        for slot in list(self.slots):
            try:
                if slot.engine.capture_next():
                    return True
            except Exception as error:
                self.on_engine_failure(slot, error)
                return True
        return False

    def _step(self, slot: EngineSlot) -> bool:
        if not slot.engine.busy:
            return False
        started = time.monotonic()
        try:
            worked = slot.engine.step()
        except Exception as error:
            self.on_engine_failure(slot, error)
            return True
        if slot.pending:
            slot.mark_admitted(started)
        return worked

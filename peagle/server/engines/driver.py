"""Driver: the only thread that uses the device.

Each round runs one job, one part of a long job, and one step of every engine. The engines share
their target, so their passes must take turns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.engines.loop_wakeup import LoopWakeup

T = TypeVar("T")
STOP_SECONDS = 5.0  # Time for a pass or a download to end when the driver stops.
IDLE_SECONDS = 1.0  # An idle driver looks for work this often even if it is not woken.


class Driver:
    def __init__(
        self,
        on_engine_failure: Callable[[EngineSlot, Exception], None],
        on_job_failure: Callable[[Exception], object],
    ) -> None:
        """Both are called on this thread: when a step of an engine raises, and when a job does."""
        self.on_engine_failure = on_engine_failure
        self.on_job_failure = on_job_failure
        self.wakeup = LoopWakeup()
        self.slots: list[EngineSlot] = []  # Only the driver's thread changes this list.
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._long_jobs: deque[tuple[Future[Any], Generator[None, None, Any]]] = deque()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="peagle-driver", daemon=True)

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
        return len(self._long_jobs)

    def wake(self) -> None:
        """Make the thread look for work now."""
        self._wake.set()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on this thread, between two steps."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        self._wake.set()
        return future

    def submit_long(self, parts: Generator[None, None, T]) -> Future[T]:
        """Run a long job, one part between two steps. Canceling the future stops it."""
        future: Future[T] = Future()
        self._long_jobs.append((future, parts))
        self._wake.set()
        return future

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()  # Before looking for work, so that no wake-up is lost.
            worked = self._run_job()
            worked |= self._run_part()
            for slot in list(self.slots):
                worked |= self._step(slot)
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
                future.set_exception(error)
                self.on_job_failure(error)
        return True

    def _run_part(self) -> bool:
        if not self._long_jobs:
            return False
        future, parts = self._long_jobs[0]
        if future.cancelled():
            parts.close()
            self._long_jobs.popleft()
            return True
        try:
            next(parts)
        except StopIteration as end:
            self._long_jobs.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except Exception as error:
            self._long_jobs.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            self.on_job_failure(error)
        else:
            self._long_jobs.rotate(-1)  # Long jobs take turns.
        return True

    def _step(self, slot: EngineSlot) -> bool:
        if not slot.busy:
            return False
        started = time.monotonic()
        self.wakeup.hold()
        try:
            worked = slot.engine.step()
        except Exception as error:
            self.on_engine_failure(slot, error)
            return True
        finally:
            self.wakeup.release()
        if slot.pending:
            slot.mark_admitted(started)
        return worked

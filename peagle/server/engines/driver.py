"""The one thread that touches the device: jobs, a part of each slow job, one step of every engine; again and again.

Engines share a target, and passes of two threads would get in each other's way. Here they take turns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from peagle.server.engines.loop_wakeup import LoopWakeup

if TYPE_CHECKING:
    from peagle.engine import Engine

T = TypeVar("T")
STOP = 5.0  # seconds for the pass or the download under way, when it stops
IDLE = 1.0  # seconds without a sign before the thread looks for itself


@dataclass(slots=True)
class Ticket:
    """When a request came, and when the engine took it in."""

    arrival: float
    admitted: float | None = None


@dataclass(slots=True, eq=False)
class EngineSlot:
    """An engine, and what the server knows of it."""

    name: str
    engine: "Engine"
    pending: dict[str, Ticket] = field(
        default_factory=dict
    )  # requests that wait for their first step
    used: float = field(default_factory=time.monotonic)
    askers: int = 0  # that prepare a request to it

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def admit(self, at: float) -> None:
        """After a step that began at `at`: who does not wait any more?"""
        for id in list(self.pending):
            if not self.engine.is_waiting(id):
                self.pending.pop(id).admitted = at


class Driver:
    def __init__(self, on_death: Callable[[EngineSlot, Exception], None]) -> None:
        """`on_death`: told, on this thread, that a step of an engine raised."""
        self.on_death = on_death
        self.bell = LoopWakeup()
        self.slots: list[EngineSlot] = []  # only this thread changes it
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._slow: deque[tuple[Future[Any], Generator[None, None, Any]]] = deque()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="peagle-driver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Runs it on this thread, between two steps."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        self._wake.set()
        return future

    def submit_slow(self, parts: Generator[None, None, T]) -> Future[T]:
        """Runs one part of it between two steps; whoever cancels the future stops it."""
        future: Future[T] = Future()
        self._slow.append((future, parts))
        self._wake.set()
        return future

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.clear()  # before looking: a sign that comes now is not lost
            worked = self._job()
            worked |= self._part()
            for slot in list(self.slots):
                worked |= self._step(slot)
            if not worked and not self._stopped:
                self._wake.wait(IDLE)

    def _job(self) -> bool:
        try:
            future, job = self._jobs.get_nowait()
        except Empty:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        return True

    def _part(self) -> bool:
        if not self._slow:
            return False
        future, parts = self._slow[0]
        if future.cancelled():
            parts.close()
            self._slow.popleft()
            return True
        try:
            next(parts)
        except StopIteration as end:
            self._slow.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except Exception as error:
            self._slow.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            self._slow.rotate(-1)  # they take turns
        return True

    def _step(self, slot: EngineSlot) -> bool:
        if not slot.busy:
            return False
        started = time.monotonic()
        self.bell.hold()
        try:
            worked = slot.engine.step()
        except Exception as error:
            self.on_death(slot, error)
            return True
        finally:
            self.bell.release()
        if slot.pending:
            slot.admit(started)
        return worked

"""EngineBuilder: the thread that builds extra engines, while the driver steps the others."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from peagle.server.engines.engine_slot import EngineSlot

T = TypeVar("T")
STOP_SECONDS = 5.0  # Time for a build to end when the builder stops.
Job = tuple[Future[EngineSlot], Callable[[], EngineSlot]]


class EngineBuilder:
    """Builds one engine after the other. Its thread does not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="peagle-builder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, build: Callable[[], EngineSlot]) -> Future[EngineSlot]:
        future: Future[EngineSlot] = Future()
        self._jobs.put((future, build))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            run_build(*job)
            del job


def run_build(future: Future[EngineSlot], build: Callable[[], EngineSlot]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(build())
        except Exception as error:
            # The frames of its traceback hold half an engine.
            traceback.clear_frames(error.__traceback__)
            future.set_exception(error)
    del future, build  # Nor may this frame hold the error's future.

"""ExtraEngines: the engines for methods and K that are not the server's own.

They are built on the builder's thread, and added and removed on the driver's.
"""

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from peagle.server.engines.driver import Driver
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.engines.status_counts import StatusCounts, counts_of
from peagle.server.http.errors import ApiError
from peagle.server.messages import EngineKey

T = TypeVar("T")
MIN_IDLE_SECONDS = 1.0  # An engine used more recently is not closed for another one.
DRIVER_POLL_SECONDS = 1.0


class ExtraEngines:
    def __init__(
        self, factory: EngineFactory, driver: Driver, counts: StatusCounts, max_engines: int
    ) -> None:
        """`counts` keeps those of engines that are removed."""
        self.factory = factory
        self.driver = driver
        self.counts = counts
        self.max_engines = max_engines
        self.slots: dict[EngineKey, EngineSlot] = {}
        self.closed = False
        self._builder = ThreadPoolExecutor(1, "peagle-builder")

    def build(self, key: EngineKey, others: int) -> "Future[EngineSlot]":
        """Build an engine on the builder's thread, beside `others` being built."""
        if others >= self.max_engines:
            raise busy_error()
        return self._builder.submit(self._build_or_clear, key)

    def close(self) -> None:
        self._builder.shutdown(wait=False, cancel_futures=True)

    def remove(self, slot: EngineSlot) -> None:
        self.driver.slots.remove(slot)
        self.counts.keep({slot.name: counts_of(slot.engine.status())})
        self.slots = {key: other for key, other in self.slots.items() if other is not slot}

    def _build_or_clear(self, key: EngineKey) -> EngineSlot:
        try:
            return self._build(key)
        except Exception as error:
            # The frames of its traceback hold half an engine.
            traceback.clear_frames(error.__traceback__)
            raise

    def _build(self, key: EngineKey) -> EngineSlot:
        from peagle.engine.device import is_device_lost

        if key in self.slots:
            return self.slots[key]
        if len(self.slots) >= self.max_engines:
            self._on_driver(self._close_idle)
        try:
            slot = EngineSlot(self.factory.engine_name(key), self.factory.build_extra(key))
        except Exception as error:
            if not is_device_lost(error):
                raise
            lost = error  # The name `error` ends with this block.
            self.driver.submit(lambda: self.driver.on_job_failure(lost))
            raise closed_error() from error
        try:
            self._on_driver(lambda: self._add(key, slot))
        except BaseException:
            slot.engine.close()
            raise
        return slot

    def _add(self, key: EngineKey, slot: EngineSlot) -> None:
        if self.closed:
            raise closed_error()
        self.slots[key] = slot
        self.driver.slots.append(slot)

    def _on_driver(self, job: Callable[[], T]) -> T:
        """Run a short job on the driver's thread, and wait for it."""
        future = self.driver.submit(job)
        while True:
            try:
                return future.result(DRIVER_POLL_SECONDS)
            except TimeoutError:
                if not self.driver.alive:
                    raise closed_error() from None

    def _close_idle(self) -> None:
        """Close the engine that was unused for the longest time."""
        now = time.monotonic()
        idle = [
            slot
            for slot in self.slots.values()
            if not slot.engine.busy
            and not slot.preparing
            and now - slot.last_used > MIN_IDLE_SECONDS
        ]
        if not idle:
            raise busy_error()
        slot = min(idle, key=lambda slot: slot.last_used)
        slot.engine.close()
        self.remove(slot)


def busy_error() -> ApiError:
    return ApiError(
        503, "all engines beside the server's own are busy: try again later", retry_after=2
    )


def closed_error() -> ApiError:
    return ApiError(503, "the engine was closed just now: try again later", retry_after=2)

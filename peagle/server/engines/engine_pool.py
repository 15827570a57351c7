"""EnginePool: the engines of an engine process.

The main engine serves the server's own method and K. Extra engines are built when a request asks
for another method or K. Engines are added and removed on the driver's thread.

    loading -> ready -> ended: the pair cannot be served, or the main engine or the device failed
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from peagle.errors import UserError
from peagle.server.engines.driver import Driver
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.engines.extra_engines import ExtraEngines, closed_error
from peagle.server.engines.status_counts import StatusCounts, counts_of
from peagle.server.http.logs import log_event
from peagle.server.messages import EngineKey
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

PoolState = Literal["loading", "ready", "ended"]
MAX_EXTRA_ENGINES = 4


class EnginePool:
    def __init__(
        self,
        settings: ServerSettings,
        loader: "Callable[[], LoadedPair] | None" = None,
        max_extra: int = MAX_EXTRA_ENGINES,
    ) -> None:
        self.settings = settings
        self.state: PoolState = "loading"
        self.factory = EngineFactory(settings, loader)
        self.main: EngineSlot | None = None
        self.status_counts = StatusCounts()
        # Called on the driver's thread: the pair is loaded, and its engine is built next.
        self.on_loaded: Callable[[LoadedPair], None] = lambda pair: None
        # Called on the driver's thread: the main engine takes requests.
        self.on_ready: Callable[[], None] = lambda: None
        # Called on the driver's thread: the pair cannot be served.
        self.on_load_failure: Callable[[str], None] = lambda reason: None
        # Called on the driver's thread: the main engine or the device failed.
        self.on_main_failure: Callable[[], None] = lambda: None
        self.driver = Driver(self.engine_failed, self._job_failed)
        self.extra = ExtraEngines(self.factory, self.driver, self.status_counts, max_extra)

    def start(self) -> None:
        self.driver.start()
        self.driver.submit(self._load)

    def close(self) -> None:
        self._end()
        self.driver.stop()
        self.extra.close()
        for slot in self.slots:
            slot.engine.close()

    # --- state ------------------------------------------------------------------------------------

    @property
    def key(self) -> EngineKey:
        """The method and K of the main engine."""
        return self.factory.key

    @property
    def slots(self) -> list[EngineSlot]:
        return [slot for slot in (self.main, *self.extra.slots.values()) if slot is not None]

    def require_ready(self) -> "LoadedPair":
        if self.state != "ready" or self.factory.pair is None:
            raise closed_error()
        return self.factory.pair

    def find(self, key: EngineKey) -> EngineSlot | None:
        self.require_ready()
        return self.main if key == self.key else self.extra.slots.get(key)

    def status(self) -> dict[str, dict[str, Any]]:
        return {slot.name: slot.engine.status() for slot in self.slots}

    def counts(self) -> dict[str, Counter[str]]:
        return self.status_counts.totals(
            {slot.name: counts_of(slot.engine.status()) for slot in self.slots}
        )

    # --- building ---------------------------------------------------------------------------------

    def _load(self) -> None:
        started = time.monotonic()
        try:
            self.on_loaded(self.factory.load())
            engine = self.factory.build_main()
        except Exception as error:
            self._end()
            known = isinstance(error, UserError | OSError)
            log_event("failed to load", logging.ERROR, None if known else error, reason=str(error))
            self.on_load_failure(str(error))
            return
        self.main = EngineSlot(self.key.method, engine)
        self.driver.slots.append(self.main)
        self.state = "ready"
        log_event(
            "ready",
            model=self.settings.model_names[0],
            method=self.key.method,
            k=self.key.k,
            seconds=round(time.monotonic() - started, 2),
            startup=engine.startup.as_dict(),
            context=engine.context,
            weights=engine.weights,
            exact=engine.exact_mode or "off",
            exact_reason=engine.exact_reason,
        )
        self.on_ready()

    # --- failures, on the driver's thread ---------------------------------------------------------

    def engine_failed(self, slot: EngineSlot, error: Exception) -> None:
        """End the requests of a failed extra engine. Without its main engine, a pool ends."""
        from peagle.engine.device import is_device_lost

        log_event(
            "engine died", logging.ERROR, error, engine=slot.name, live=slot.engine.live_requests
        )
        if slot is self.main or is_device_lost(error):
            self._end()
            self.on_main_failure()
            return
        close_error = slot.engine.fail("the engine stopped: try again")
        if close_error is not None:
            log_event(
                "a dead engine could not be closed", logging.ERROR, close_error, engine=slot.name
            )
        self.extra.remove(slot)

    def _end(self) -> None:
        self.state = "ended"
        self.extra.closed = True

    def _job_failed(self, error: Exception) -> None:
        """End after a sticky error of the device: nothing can run in its context."""
        from peagle.engine.device import is_device_lost

        if is_device_lost(error) and self.state != "ended":
            self._end()
            log_event("device lost", logging.CRITICAL, error)
            self.on_main_failure()

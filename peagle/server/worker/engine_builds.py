"""EngineBuilds: engines that are being built. Who asks for the same one waits for one build."""

from collections.abc import Callable
from concurrent.futures import Future

from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.messages import EngineKey


class EngineBuilds:
    """Everything happens on the driver's thread, but for the builds themselves."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self._builds: dict[EngineKey, Future[EngineSlot]] = {}

    def __len__(self) -> int:
        return len(self._builds)

    def __contains__(self, build: "Future[EngineSlot]") -> bool:
        return build in self._builds.values()

    def start(
        self, key: EngineKey, on_built: "Callable[[Future[EngineSlot]], None]"
    ) -> "Future[EngineSlot]":
        """Build an engine, unless that is under way; `on_built` is called with the result."""
        build = self._builds.get(key)
        if build is None:
            build = self._builds[key] = self.pool.extra.build(key, len(self._builds))

        def finish(done: "Future[EngineSlot]") -> None:
            if self._builds.get(key) is done:
                del self._builds[key]
            on_built(done)

        build.add_done_callback(lambda done: self.pool.driver.submit(lambda: finish(done)))
        return build

"""The engines of a server on a thread of this process, so that a test can access them.

Web server and worker are the real ones and exchange the real messages, without a second process.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from peagle.loaded import LoadedPair
from peagle.server.engines.driver import Driver
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.front.engine_client import EngineClient
from peagle.server.front.target_text import TargetText
from peagle.server.messages import EngineKey, EngineState, ServerState, TargetInfo
from peagle.server.settings import ServerSettings
from peagle.server.worker.engine_worker import EngineWorker

NUMBERS = itertools.count()


class ThreadSource:
    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.worker: EngineWorker | None = None

    def start(
        self, on_state: Callable[[ServerState], None], on_failure: Callable[[str], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        address = f"inproc://engine-{next(NUMBERS)}"
        self.worker = EngineWorker(self.pool, address)
        ended = ServerState([EngineState("engine", address, running=False)])

        def main_failed() -> None:
            loop.call_soon_threadsafe(on_state, ended)

        def load_failed(reason: str) -> None:
            loop.call_soon_threadsafe(on_failure, reason)

        self.pool.on_main_failure = main_failed
        self.pool.on_load_failure = load_failed
        self.pool.start()
        on_state(ServerState([EngineState("engine", address, running=True)]))

    async def close(self) -> None:
        self.pool.close()
        if self.worker is not None and not self.pool.driver.alive:
            self.worker.close()


class ThreadEngines(EngineClient):
    source: ThreadSource

    def __init__(
        self, settings: ServerSettings, loader: Callable[[], LoadedPair], max_extra: int
    ) -> None:
        self.engine_pool = EnginePool(settings, loader, max_extra)
        super().__init__(settings, ThreadSource(self.engine_pool))

    def load_text(self, target: TargetInfo) -> TargetText:
        """The tokenizer of the pair in memory, which has no folder."""
        assert self.engine_pool.factory.pair is not None
        return TargetText(target, self.engine_pool.factory.pair.target.tokenizer)

    @property
    def main(self) -> EngineSlot | None:
        return self.engine_pool.main

    @property
    def extra(self) -> dict[EngineKey, EngineSlot]:
        return self.engine_pool.extra.slots

    @property
    def slots(self) -> list[EngineSlot]:
        return self.engine_pool.slots

    @property
    def factory(self) -> EngineFactory:
        return self.engine_pool.factory

    @property
    def driver(self) -> Driver:
        return self.engine_pool.driver

    def status(self) -> dict[str, dict[str, Any]]:
        return self.engine_pool.status()

    def counts(self) -> dict[str, Counter[str]]:
        return self.engine_pool.counts()

"""WorkerLearning: what an engine process does for `peagle serve --learn`.

    answered requests -> StoreWriter       rounds of the driver -> EngineLoadWriter
    current.json -> DrafterVersions -> all engines of the method, between two steps

An error here never touches a request: without its folder the process serves, and does not learn.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.core import DRAFTER_METHODS
from peagle.errors import UserError
from peagle.learn.engine_load import EngineLoadWriter
from peagle.learn.folder import LearnFolder, target_identity
from peagle.learn.segment import StoreLimits
from peagle.learn.store import StoreCounts, StoreWriter
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.http.logs import log_event
from peagle.server.messages import LearnReport
from peagle.server.worker.drafter_versions import DrafterVersions

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

STOP_SECONDS = 1.0  # For documents that are queued when the process ends.
LOAD_SECONDS = 0.002  # Between two writes of the load while requests run.


class WorkerLearning:
    def __init__(self, pool: EnginePool, folder: Path, engine: str) -> None:
        """`engine`: the name of this process among those of the server."""
        self.pool = pool
        self.folder = LearnFolder(folder)
        self.engine = engine
        self.failure: str | None = None
        self.versions: DrafterVersions | None = None
        self._writer: StoreWriter | None = None
        self._load: EngineLoadWriter | None = None
        self._was_busy = False
        self._next_load = 0.0
        pool.on_loaded = self.begin

    def begin(self, pair: "LoadedPair") -> None:
        """Open the folder and load the current version; before engines are built."""
        method = self.pool.key.method
        if method not in DRAFTER_METHODS:
            raise UserError(
                f"`learn` trains a drafter, and `method` {method} has none: leave out `learn`"
            )
        try:
            self._open(pair)
        except Exception as error:  # A broken file must not end the start.
            known = isinstance(error, UserError | OSError)
            self.failure = str(error) if known else f"{type(error).__name__}: {error}"
            log_event(
                "learning is off", logging.ERROR, None if known else error, reason=self.failure
            )

    def _open(self, pair: "LoadedPair") -> None:
        target = pair.target
        if target.folder is None:
            raise UserError(f"the target {target.name!r} was not loaded from a folder")
        identity = target_identity(
            target.folder, target.name or "", target.revision, target.vocab_size
        )
        self.folder.open(identity)
        versions = DrafterVersions(self.folder, self.pool, pair, self.pool.key.method)
        self._load = EngineLoadWriter(self.folder, self.engine)
        settings = self.pool.settings
        self._writer = StoreWriter(
            self.folder,
            self.engine,
            StoreLimits(int(settings.learn_size * (1 << 20)), settings.learn_days),
            share=settings.learn_share,
            report=partial(log_event, "learn", logging.WARNING),
        )
        self.versions = versions
        versions.start()

    def store(self, prompt: list[int], answer: Sequence[int]) -> None:
        """Store an answered request behind its answer; on the driver's thread."""
        if self._writer is not None:
            self._writer.add(prompt, answer)

    def write_load(self, now: float) -> None:
        """Tell the trainer whether requests run; at the beginning of a round of the driver."""
        if self._load is None:
            return
        live = sum(slot.engine.live_requests for slot in self.pool.slots)
        live += self.pool.driver.long_jobs
        is_busy = live > 0
        if is_busy == self._was_busy and (now < self._next_load or not is_busy):
            return
        self._was_busy = is_busy
        self._next_load = now + LOAD_SECONDS
        waiting = sum(slot.engine.waiting_requests for slot in self.pool.slots) if is_busy else 0
        self._load.write(max(live - waiting, 0), waiting, now)

    def report(self) -> LearnReport:
        counts = self._writer.counts if self._writer is not None else StoreCounts()
        report = LearnReport(
            failure=self.failure,
            documents=counts.documents,
            tokens=counts.tokens,
            dropped=counts.dropped,
            store_failure=counts.failure,
        )
        if self.versions is not None:
            self.versions.add_to(report)
        return report

    def close(self) -> None:
        if self.versions is not None:
            self.versions.close()
        if self._writer is not None:
            self._writer.close(STOP_SECONDS)
        if self._load is not None:
            self._load.close()
            self._load = None


def create_learning(pool: EnginePool, address: str) -> WorkerLearning | None:
    """What this process does for `learn`; None: the server does not learn.

    The address of its socket ends with the name of the process, and a number.
    """
    if pool.settings.learn is None:
        return None
    name = address.rpartition("/")[2].partition(".")[0]
    return WorkerLearning(pool, Path(pool.settings.learn), name)

"""DrafterVersions: follows current.json, and gives the engines the version that it names.

A version is loaded and prepared on a thread of its own; an engine swaps it in between two steps.
One that cannot be loaded is reported, and the engines go on with the one that they have.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from peagle.core import Method
from peagle.errors import UserError
from peagle.learn.folder import LearnFolder
from peagle.learn.versions import (
    CurrentVersion,
    check_base,
    drafter_digest,
    read_current,
    version_folder,
)
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.http.logs import log_event
from peagle.server.messages import LearnReport, VersionCounts

if TYPE_CHECKING:
    from peagle.engine import Engine
    from peagle.loaded import LoadedPair

POLL_SECONDS = 0.5
RETRY_SECONDS = 60.0  # Before a version that could not be loaded is tried again.
STOP_SECONDS = 1.0  # For a version that is being loaded when the process ends.


class DrafterVersions:
    def __init__(
        self, folder: LearnFolder, pool: EnginePool, pair: "LoadedPair", method: Method
    ) -> None:
        """UserError: the versions in the folder were trained from another drafter."""
        from peagle.pull import pull_drafter

        base = pull_drafter(pair.pair, method)
        if base is None:
            raise UserError(f"the pair has no trained {method} drafter to continue: train one")
        check_base(folder, drafter_digest(base))
        self.folder = folder
        self.pool = pool
        self.pair = pair
        self.method = method
        self.base = base
        self.version = 0
        self._seen = CurrentVersion()
        self._failure: str | None = None
        self._retry_at = 0.0
        self._was_swapped = False
        self._given: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()  # Version by engine.
        self._counts: dict[int, VersionCounts] = {}
        self._counted = VersionCounts()  # Of the main engine, when the version was swapped in.
        self._lock = threading.Lock()  # A report has all of a change, or nothing of it.
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peagle-versions", daemon=True)

    def start(self) -> None:
        """Load the current version, for the engines that are built next, and follow it."""
        self.follow()
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def add_to(self, report: LearnReport) -> None:
        """Add the version that drafts, and what each has done; on the driver's thread."""
        main = self.pool.main
        report.drafter = str(self.base)
        with self._lock:
            report.version = self.version if main is None else main.engine.drafter_version
            if self._failure is not None:
                report.failed_version = self._seen.number
                report.version_failure = self._failure
            report.versions = self._counts | {self.version: self._count(self._main_counts())}

    def follow(self) -> None:
        """Swap in the current version, unless it drafts already or could not be loaded just now."""
        try:
            current = read_current(self.folder)
            now = time.monotonic()
            if current != self._seen or (self._failure is not None and now >= self._retry_at):
                with self._lock:
                    if current != self._seen:
                        self._failure = None
                    self._seen = current
                self._retry_at = now + RETRY_SECONDS
                if current.number != self.version:
                    self._load(current.number)
            self._update_engines()
            if current.number == self.version:
                self._failure = None
        except Exception as error:
            known = isinstance(error, UserError | OSError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            if reason != self._failure:
                log_event(
                    "drafter not swapped", logging.ERROR, None if known else error, reason=reason
                )
            self._failure = reason

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self.follow()

    def _load(self, number: int) -> None:
        """Load a version for engines that run, and for those that are built later."""
        from peagle.drafter.formats import checkpoint

        folder = version_folder(self.folder, number) if number else self.base
        target = self.pair.target
        drafter = checkpoint.load(folder, target, target.dtype)
        if drafter.config.method != self.method:
            raise UserError(f"version {number} is a {drafter.config.method} drafter")
        self._was_swapped = True
        self.pair.replace_drafter(self.method, drafter)
        before = self.version
        with self._lock:
            counted = self._main_counts()
            self._counts[before] = self._count(counted)
            self._counted = counted
            self._failure = None
            self.version = number
        self._update_engines()
        log_event("drafter swapped", version=number, before=before)

    def _update_engines(self) -> None:
        """Give the drafter to the engines that lack it, such as one that was being built."""
        for slot in self.pool.slots:
            engine = slot.engine
            # One that was built meanwhile may have the drafter of any version.
            given = self._given.get(engine, None if self._was_swapped else 0)
            if engine.method == self.method and given != self.version and not engine.closed:
                self._update(engine)

    def _update(self, engine: "Engine") -> None:
        try:
            engine.replace_drafter(self.pair.drafter(self.method), version=self.version)
        except UserError:
            if not engine.closed:  # It may be closed at any time.
                raise
        self._given[engine] = self.version

    def _count(self, now: VersionCounts) -> VersionCounts:
        """What the version that drafts now has done, with these counts of the main engine."""
        known = self._counts.get(self.version, VersionCounts())
        return VersionCounts(
            known.drafts + now.drafts - self._counted.drafts,
            known.accepted_tokens + now.accepted_tokens - self._counted.accepted_tokens,
        )

    def _main_counts(self) -> VersionCounts:
        main = self.pool.main
        if main is None:
            return VersionCounts()
        return VersionCounts(main.engine.metrics.drafts, main.engine.metrics.accepted_tokens)

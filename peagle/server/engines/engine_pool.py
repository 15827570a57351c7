"""EnginePool: the engines of a server.

The main engine serves the server's own method and K and is rebuilt when it fails. Extra engines
are built when a request asks for another method or K.

    loading -> ready <-> restarting        failed: the pair or its settings cannot be served
                                           lost: the device is, and the process must end
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from peagle.core import Method
from peagle.errors import UserError, did_you_mean
from peagle.server.engines.driver import Driver
from peagle.server.engines.engine_builder import EngineBuilder
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.engines.engine_slot import EngineSlot, RequestTiming
from peagle.server.engines.generation_params import GenerationParams
from peagle.server.engines.grammar_queue import GrammarQueue
from peagle.server.engines.method_choice import EngineKey
from peagle.server.engines.restart_timer import RestartTimer
from peagle.server.engines.status_counts import CountKey, StatusCounts
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.settings import ServerSettings
from peagle.server.tokenization.prompt_tokenizer import PromptTokenizer
from peagle.server.tokenization.token_text import TokenTexts
from peagle.server.tokenization.tokenizer_threads import TokenizerThreads

if TYPE_CHECKING:
    from peagle.engine import Engine
    from peagle.engine.stream import Stream
    from peagle.loaded import LoadedPair

T = TypeVar("T")
PoolState = Literal["loading", "ready", "restarting", "failed", "lost", "closed"]
ENDED: tuple[PoolState, ...] = ("failed", "lost", "closed")  # No engine is built any more.
MAX_EXTRA_ENGINES = 4
MIN_IDLE_SECONDS = 1.0  # An extra engine used more recently is not closed for another one.
DRIVER_POLL_SECONDS = 1.0
STALLED = "a step of the engine hangs"
UNAVAILABLE = {
    "ready": "the engine was closed just now",
    "loading": "the model is still loading",
    "restarting": "the engine stopped and is being started again",
    "failed": "the model could not be loaded",
    "lost": "the device is lost, and the server ends",
    "closed": "the server is shutting down",
}


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
        self.extra: dict[EngineKey, EngineSlot] = {}
        self.max_extra = max_extra
        self.status_counts = StatusCounts()
        self.restarts = 0
        self.scorings = 0  # Prompts whose own log-probabilities are awaited.
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.device_lost = False
        self.driver = Driver(self._engine_failed, self._end_if_device_lost, self._driver_crashed)
        self.builder = EngineBuilder()
        max_requests = settings.max_batch + settings.max_queue
        self.tokenizer_threads = TokenizerThreads(max_requests)
        self.grammar_queue = GrammarQueue(max_requests)
        self._builds: dict[EngineKey, asyncio.Future[EngineSlot]] = {}
        self._ids = itertools.count()
        self._restart_timer = RestartTimer(settings.backoff)

    def start(self) -> None:
        self.driver.start()
        self.builder.start()
        self.driver.submit(self._load)

    def close(self) -> None:
        self.state = "closed"
        self._restart_timer.cancel()
        self.driver.stop()
        self.builder.stop()
        for slot in self.slots:
            slot.engine.close()
        self.tokenizer_threads.close()
        self.grammar_queue.close()

    # --- requests ---------------------------------------------------------------------------------

    @property
    def threads_alive(self) -> bool:
        """Whether a step or a build is still running after `close`."""
        return self.driver.alive or self.builder.alive

    @property
    def unavailable_reason(self) -> str:
        return STALLED if self.stalled else UNAVAILABLE[self.state]

    def unavailable(self) -> ApiError:
        return ApiError(503, f"{self.unavailable_reason}: try again later", retry_after=2)

    def require_ready(self) -> "LoadedPair":
        pair = self.factory.pair
        if self.state != "ready" or pair is None or self.stalled:
            raise self.unavailable()
        return pair

    @property
    def key(self) -> EngineKey:
        """The method and K of the main engine."""
        return self.factory.key

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that a request may choose."""
        return self.factory.methods

    @property
    def tokenizer(self) -> PromptTokenizer:
        assert self.factory.tokenizer is not None, "the pair is not loaded yet"
        return self.factory.tokenizer

    @property
    def texts(self) -> TokenTexts:
        assert self.factory.texts is not None, "the pair is not loaded yet"
        return self.factory.texts

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its answer; 0 while it is unknown."""
        return self.main.engine.context if self.main is not None else 0

    def choose(self, method: str | None, k: int | str | None) -> EngineKey:
        """The engine for a request that asks for this method and K; None: the server's own."""
        if method is None and k is None:
            return self.key
        name = method or self.key.method
        chosen = next((offered for offered in self.methods if offered == name), None)
        if chosen is None:
            close = did_you_mean(name, list(self.methods))
            offered = ", ".join(self.methods)
            raise ApiError(
                400, f"peagle.method {name!r} is not served: use one of {offered}.{close}"
            )
        if chosen == "none":
            return EngineKey("none", 0)
        return EngineKey(chosen, k or self.settings.k)

    @asynccontextmanager
    async def slot(self, key: EngineKey) -> AsyncIterator[EngineSlot]:
        """The engine for this key, built if needed. It stays open while a request is prepared."""
        slot = await self._find_slot(key)
        slot.preparing += 1
        try:
            yield slot
        finally:
            slot.preparing -= 1

    async def _find_slot(self, key: EngineKey) -> EngineSlot:
        self.require_ready()
        slot = self.main if key == self.key else self.extra.get(key)
        if slot is None and key == self.key:  # It failed just now.
            raise ApiError(503, "the engine stopped: try again later", retry_after=2)
        if slot is None:
            slot = await self._build_extra(key)
        slot.last_used = time.monotonic()
        return slot

    async def _build_extra(self, key: EngineKey) -> EngineSlot:
        """Wait for an extra engine. Requests for the same one share its build."""
        build = self._builds.get(key)
        if build is None:
            if len(self._builds) >= self.max_extra:
                raise busy_error()
            build = asyncio.wrap_future(self.builder.submit(lambda: self._extra_slot(key)))
            self._builds[key] = build
            build.add_done_callback(lambda done: self._build_ended(key, done))
        return await asyncio.shield(build)  # A client that leaves does not cancel it for others.

    def _build_ended(self, key: EngineKey, build: "asyncio.Future[EngineSlot]") -> None:
        del self._builds[key]
        if not build.cancelled():
            build.exception()  # Retrieved here, because every client may have left.

    @contextmanager
    def scoring(self, prompts: int) -> Iterator[None]:
        """Count prompts whose own log-probabilities are computed. They take places in the queue."""
        max_queue = self.settings.max_queue
        queued = self.scorings + (self.main.engine.waiting_requests if self.main else 0)
        if queued + prompts > max_queue:
            waiting = f"{queued} requests are already waiting, and the queue holds {max_queue}"
            raise ApiError(429, f"{waiting}: try again later", retry_after=1)
        self.scorings += prompts
        try:
            yield
        finally:
            self.scorings -= prompts

    def add(
        self, slot: EngineSlot, ids: list[int], params: GenerationParams
    ) -> "tuple[Stream, RequestTiming]":
        """Queue a request. Refusals of the engine become ApiErrors: 400, 429 or 503."""
        from peagle.engine.schedule.queue import QueueFull

        try:
            stream, timing = slot.add(f"s{next(self._ids)}", ids, params)
        except QueueFull as error:
            raise ApiError(429, str(error), retry_after=1) from error
        except UserError as error:
            if slot.engine.closed:
                raise self.unavailable() from error
            raise ApiError(400, str(error)) from error
        self.driver.wake()
        return stream, timing

    # --- state ------------------------------------------------------------------------------------

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the driver's last sign of life; 0 unless it should answer requests."""
        return self.driver.heartbeat_age if self.state == "ready" else 0.0

    @property
    def stalled(self) -> bool:
        """Whether a step takes so long that it must be taken for hung."""
        limit = self.settings.step_timeout
        return bool(limit) and self.heartbeat_age > limit

    @property
    def slots(self) -> list[EngineSlot]:
        return [slot for slot in (self.main, *self.extra.values()) if slot is not None]

    def status(self) -> dict[str, dict[str, Any]]:
        return {slot.name: slot.engine.status() for slot in self.slots}

    def counts(self) -> dict[str, Counter[CountKey]]:
        with self.status_counts.lock:
            return self.status_counts.totals(self.slots)

    # --- building, on the driver's thread ---------------------------------------------------------

    def _load(self) -> None:
        started = time.monotonic()
        try:
            self.factory.load()
            engine = self._start_main()
        except Exception as error:
            if self.state == "closed" or self._end_if_device_lost(error):
                return
            self.state = "failed"
            known = isinstance(error, UserError | OSError)
            log_event("failed to load", logging.ERROR, None if known else error, reason=str(error))
            self.on_failure(str(error))
            return
        log_event(
            "ready",
            model=self.settings.model_names[0],
            method=self.key.method,
            k=self.key.k,
            seconds=round(time.monotonic() - started, 2),
            context=engine.context,
            weights=engine.weights,
        )

    def _start_main(self) -> "Engine":
        engine = self.factory.build_main()
        self.main = EngineSlot(self.key.method, engine)
        self.driver.slots.append(self.main)
        if self.state not in ENDED:
            self.state = "ready"
        self._restart_timer.engine_ready()
        return engine

    def _extra_slot(self, key: EngineKey) -> EngineSlot:
        """Build an extra engine; on the builder's thread, unlike the others here."""
        from peagle.engine.device import is_device_lost

        self.require_ready()
        if key in self.extra:
            return self.extra[key]
        if len(self.extra) >= self.max_extra:
            self._on_driver(self._close_idle_engine)
        try:
            slot = EngineSlot(self.factory.engine_name(key), self.factory.build_extra(key))
        except Exception as error:
            if not is_device_lost(error):
                raise
            lost = error  # The name `error` ends with this block.
            self.driver.submit(lambda: self._end_if_device_lost(lost))
            raise self.unavailable() from error
        try:
            self._on_driver(lambda: self._add_extra(key, slot))
        except BaseException:
            slot.engine.close()
            raise
        return slot

    def _add_extra(self, key: EngineKey, slot: EngineSlot) -> None:
        if self.state in ENDED:
            raise self.unavailable()
        self.extra[key] = slot
        self.driver.slots.append(slot)

    def _on_driver(self, job: Callable[[], T]) -> T:
        """Run a short job on the driver's thread, and wait for it."""
        future = self.driver.submit(job)
        while True:
            try:
                return future.result(DRIVER_POLL_SECONDS)
            except TimeoutError:
                if not self.driver.alive:
                    raise self.unavailable() from None

    def _close_idle_engine(self) -> None:
        """Close the extra engine that was unused for the longest time."""
        now = time.monotonic()
        idle = [
            slot
            for slot in self.extra.values()
            if not slot.busy and not slot.preparing and now - slot.last_used > MIN_IDLE_SECONDS
        ]
        if not idle:
            raise busy_error()
        slot = min(idle, key=lambda slot: slot.last_used)
        slot.engine.close()
        self._remove(slot)

    def _remove(self, slot: EngineSlot) -> None:
        self.driver.slots.remove(slot)
        with self.status_counts.lock:
            self.status_counts.keep(slot)
            if slot is self.main:
                self.main = None
            self.extra = {key: other for key, other in self.extra.items() if other is not slot}

    # --- failures, on the driver's thread ---------------------------------------------------------

    def _engine_failed(self, slot: EngineSlot, error: Exception) -> None:
        """End the requests of a failed engine. The main engine is built again."""
        log_event(
            "engine died",
            logging.ERROR,
            error,
            engine=slot.name,
            live=slot.engine.live_requests,
        )
        if self._end_if_device_lost(error) or self.device_lost:
            return
        is_main = slot is self.main
        if is_main and self.state == "ready":
            self.state = "restarting"
        close_error = slot.engine.fail("the engine stopped: try again")
        if close_error is not None:
            log_event(
                "a dead engine could not be closed", logging.ERROR, close_error, engine=slot.name
            )
        self._remove(slot)
        if is_main:
            self._restart_timer.engine_died(answered=slot.has_answered)
            self._schedule_restart(reload=False)

    def _driver_crashed(self, error: Exception) -> None:
        log_event("the driver died", logging.ERROR, error)
        self._give_up(f"the thread that runs the engines stopped: {type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        """Let the process exit with an error, so that a supervisor starts a new one."""
        if self.state not in ENDED:
            self.state = "failed"
            self.on_failure(reason)

    def _end_if_device_lost(self, error: Exception) -> bool:
        """After a sticky error of the device, end the process: nothing can run in its context.

        A supervisor starts a new one; for a replica, the gateway does.
        """
        from peagle.engine.device import is_device_lost

        if not is_device_lost(error):
            return False
        if not self.device_lost:
            self.device_lost = True
            if self.state != "closed":
                self.state = "lost"
            log_event("device lost", logging.CRITICAL, error)
            try:
                for slot in self.slots:
                    slot.engine.fail("the engine stopped: try again")
                    self._remove(slot)
            finally:
                self.on_failure(f"the device is lost: {error}")
        return True

    def _schedule_restart(self, reload: bool) -> None:
        if self.state in ENDED:
            return
        if self._restart_timer.exhausted:
            failures = self._restart_timer.failures
            reason = f"the engine failed {failures} times in a row: the log has the errors"
            log_event("gave up", logging.ERROR, reason=reason)
            self._give_up(reason)
            return
        wait = self._restart_timer.schedule(
            lambda: self.driver.submit(lambda: self._restart(reload))
        )
        log_event(
            "engine to be made again", logging.WARNING, engine=self.key.method, next_try_in=wait
        )

    def _restart(self, reload: bool) -> None:
        """Rebuild the main engine from the loaded weights; if that failed, from the files."""
        if self.state in ENDED:
            return
        self.restarts += 1
        try:
            self.factory.release_memory()
            if reload:
                self.factory.reload()
            self._start_main()
        except Exception as error:
            if self._end_if_device_lost(error):
                return
            log_event("restart failed", logging.ERROR, error)
            self._restart_timer.restart_failed()
            self._schedule_restart(reload=True)
            return
        log_event("restarted", engine=self.key.method, restarts=self.restarts)


def busy_error() -> ApiError:
    return ApiError(
        503, "all engines beside the server's own are busy: try again later", retry_after=2
    )

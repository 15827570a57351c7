"""The engines of a server: one for its method and K, others when a request asks for them; made again when they die.

loading -> ready <-> restarting      failed: what was asked for cannot be served at all
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from peagle.core import Method
from peagle.engine.gc_tuning import freeze_live_objects
from peagle.errors import UserError, nearest
from peagle.server.backoff import Backoff
from peagle.server.engines.driver import Driver, EngineSlot, Ticket
from peagle.server.engines.method_choice import Key, choose_method
from peagle.server.engines.status_counts import Tallies
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    from peagle.engine.stream import Stream
    from peagle.loaded import LoadedPair
    from peagle.server.engines.token_text import TokenTexts

State = Literal["loading", "ready", "restarting", "failed", "closed"]
MAX_ENGINES = 4  # engines beside the server's own
MODEST = 1 << 13  # positions each of them has room for
SMALL = 16  # requests each of them runs at once


class ServerEngines:
    def __init__(
        self, settings: ServerSettings, loader: "Callable[[], LoadedPair] | None" = None
    ) -> None:
        self.settings = settings
        self.state: State = "loading"
        self.loaded: LoadedPair | None = None
        self.texts: TokenTexts | None = None
        self.main: EngineSlot | None = None
        self.key: Key = ("none", 0)
        self.methods: tuple[Method, ...] = ()
        self.others: dict[Key, EngineSlot] = {}
        self.tallies = Tallies()
        self.restarts = 0
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.driver = Driver(self._died)
        self.tokenizing = ThreadPoolExecutor(1, "peagle-tokenizer")
        self._loader = loader or self._load_pair
        self._ids = itertools.count()
        self._backoff, self._since = Backoff(settings.backoff), 0.0
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        self.driver.start()
        self.driver.submit(self._load)

    def close(self) -> None:
        self.state = "closed"
        if self._timer is not None:
            self._timer.cancel()
        self.driver.stop()
        for slot in self.slots:
            slot.engine.close()
        self.tokenizing.shutdown(wait=False)

    @property
    def slots(self) -> list[EngineSlot]:
        return [slot for slot in (self.main, *self.others.values()) if slot is not None]

    @property
    def reason(self) -> str:
        """Why it cannot answer now."""
        return {
            "ready": "the engine was closed just now",
            "loading": "the model is still loading",
            "restarting": "the engine stopped and is being started again",
            "failed": "the model could not be loaded",
        }.get(self.state, "the server is shutting down")

    def require_ready(self) -> "LoadedPair":
        if self.state != "ready" or self.loaded is None:
            raise ApiError(503, f"{self.reason}: try again later", retry_after=2)
        return self.loaded

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.main.engine.context if self.main is not None else 0

    def choose(self, method: str | None, k: int | str | None) -> Key:
        """What a request asked for, or the server's own."""
        if method is None and k is None:
            return self.key
        word = method or self.key[0]
        if word not in self.methods:
            close = nearest(word, list(self.methods))
            raise ApiError(
                400,
                f"peagle.method {word!r} is not served: use one of {', '.join(self.methods)}.{close}",
            )
        chosen = next(one for one in self.methods if one == word)
        if chosen == "none":
            return "none", 0
        return chosen, k or self.settings.k

    @asynccontextmanager
    async def slot(self, key: Key) -> AsyncIterator[EngineSlot]:
        """Made when it is first asked for; it stays while its askers prepare what they ask."""
        slot = await self._slot(key)
        slot.askers += 1
        try:
            yield slot
        finally:
            slot.askers -= 1

    async def _slot(self, key: Key) -> EngineSlot:
        self.require_ready()
        slot = self.main if key == self.key else self.others.get(key)
        if slot is None and key == self.key:  # it died just now
            raise ApiError(503, "the engine stopped: try again later", retry_after=2)
        if slot is None:
            slot = await asyncio.wrap_future(self.driver.submit(lambda: self._other(key)))
        slot.used = time.monotonic()
        return slot

    def add(self, slot: EngineSlot, ids: list[int], **how: Any) -> "tuple[Stream, Ticket]":
        from peagle.engine.schedule.queue import QueueFull

        id, ticket = f"s{next(self._ids)}", Ticket(time.monotonic())
        try:
            stream = slot.engine.add(ids, id=id, **how)
        except QueueFull as error:
            raise ApiError(429, str(error), retry_after=1) from error
        except UserError as error:
            if slot.engine.closed:
                raise ApiError(503, f"{self.reason}: try again later", retry_after=2) from error
            raise ApiError(400, str(error)) from error
        slot.pending[id] = ticket
        self.driver.wake()
        return stream, ticket

    def status(self) -> dict[str, dict[str, Any]]:
        return {slot.name: slot.engine.status() for slot in self.slots}

    def counts(self) -> dict[str, Counter[Any]]:
        with self.tallies.lock:
            return self.tallies.with_those_of(self.slots)

    # --- on the driver's thread ---------------------------------------------------------------------------------------

    def _load_pair(self) -> "LoadedPair":
        from peagle.loaded import load_with_drafters

        how = self.settings
        loaded = load_with_drafters(how.pair, how.target, how.drafter, how.device, how.dtype)
        freeze_live_objects()
        return loaded

    def _load(self) -> None:
        started = time.monotonic()
        try:
            self.loaded = self._loader()
            self._settle(self.loaded)
            self._build_main()
        except Exception as error:
            if self.state == "closed":
                return
            self.state = "failed"
            known = isinstance(error, UserError | OSError)
            log_event("failed to load", logging.ERROR, None if known else error, reason=str(error))
            self.on_failure(str(error))
            return
        seconds = round(time.monotonic() - started, 2)
        names, weights = (
            list(self.settings.model_names),
            self.main.engine.weights if self.main else "",
        )
        log_event(
            "ready",
            model=names[0],
            method=self.key[0],
            k=self.key[1],
            seconds=seconds,
            context=self.context,
            weights=weights,
        )

    def _settle(self, loaded: "LoadedPair") -> None:
        """Which methods there are, and which is the server's own."""
        from peagle.server.engines.token_text import TokenTexts

        if loaded.target.tokenizer is None:
            raise UserError(
                f"target {loaded.target.name!r} has no tokenizer: put its files into the target's folder"
            )
        self.texts = TokenTexts(loaded.target.tokenizer)
        self.key, self.methods = choose_method(self.settings, loaded.pair)

    def _build_main(self) -> None:
        how = self.settings
        engine = self._engine(self.key, how.kv_tokens, how.max_batch)
        engine.warm_up()
        self.main = EngineSlot(self.key[0], engine)
        self.driver.slots.append(self.main)
        self.state, self._since = "ready", time.monotonic()

    def _engine(self, key: Key, tokens: int | None, batch: int) -> Any:
        from peagle.engine import Engine, EngineConfig

        how = self.settings
        own = (
            key[0] == self.key[0] and key[1] == how.k
        )  # a request that names a K of its own gets a chain
        config = EngineConfig(
            method=key[0],
            k=key[1] or "auto",
            tree=how.tree if own else 0,
            max_batch=batch,
            context=how.context,
            kv_tokens=tokens,
            prefill_chunk=how.chunk,
            max_queue=how.max_queue,
            exact=how.exact,
            int8=how.int8,
            prefix_caching=how.prefix_caching,
            cuda_graphs=how.graphs,
            thread=False,
        )
        return Engine(self.loaded or how.pair, config)

    def _other(self, key: Key) -> EngineSlot:
        if key in self.others:
            return self.others[key]
        if len(self.others) >= MAX_ENGINES:
            self._make_room()
        modest = max(MODEST, self.settings.context or 0)
        engine = self._engine(
            key, min(modest, self.settings.kv_tokens or modest), min(SMALL, self.settings.max_batch)
        )
        name = key[0] if key[1] in (0, self.settings.k) else f"{key[0]} k={key[1]}"
        slot = self.others[key] = EngineSlot(name, engine)
        self.driver.slots.append(slot)
        return slot

    def _make_room(self) -> None:
        """The engine that was not used for longest goes, if nobody needs it."""
        idle = [
            (slot.used, key) for key, slot in self.others.items() if not (slot.busy or slot.askers)
        ]
        idle = [(used, key) for used, key in idle if time.monotonic() - used > 1]
        if not idle:
            raise ApiError(
                503, "all engines beside the server's own are busy: try again later", retry_after=2
            )
        slot = self.others[min(idle)[1]]
        slot.engine.close()
        self._retire(slot)

    def _retire(self, slot: EngineSlot) -> None:
        self.driver.slots.remove(slot)
        with self.tallies.lock:
            self.tallies.keep(slot)
            if slot is self.main:
                self.main = None
            self.others = {key: one for key, one in self.others.items() if one is not slot}

    def _died(self, slot: EngineSlot, error: Exception) -> None:
        """Whoever waits is told; the server's own engine is made again."""
        log_event(
            "engine died",
            logging.ERROR,
            error,
            engine=slot.name,
            live=slot.engine.live_requests,
        )
        ours = slot is self.main
        if ours:
            self.state = "restarting" if self.state == "ready" else self.state
        failed = slot.engine.fail("the engine stopped: try again")
        if failed is not None:
            log_event("a dead engine could not be closed", logging.ERROR, failed, engine=slot.name)
        self._retire(slot)
        if ours:
            self._again(time.monotonic() - self._since, reload=False)

    def _again(self, lived: float, reload: bool) -> None:
        if self.state == "closed":
            return
        wait = self._backoff.next(lived)
        log_event("engine to be made again", logging.WARNING, engine=self.key[0], next_try_in=wait)
        self._timer = threading.Timer(
            wait, lambda: self.driver.submit(lambda: self._restart(reload))
        )
        self._timer.daemon = True
        self._timer.start()

    def _restart(self, reload: bool) -> None:
        """From the weights that are there; if that fails, from the files."""
        self.restarts += 1
        release(self.loaded)
        try:
            if reload:
                self.loaded = None
                self.loaded = self._loader()
            self._build_main()
        except Exception as error:
            log_event("restart failed", logging.ERROR, error)
            self._again(0.0, reload=True)
            return
        log_event("restarted", engine=self.key[0], restarts=self.restarts)


def release(loaded: "LoadedPair | None") -> None:
    """An engine's memory, before the next one wants as much."""
    import torch

    freeze_live_objects()
    if loaded is not None and loaded.target.device.type == "cuda":
        torch.cuda.empty_cache()

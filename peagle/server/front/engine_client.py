"""EngineClient: the engines of a server, as the routes of a front use them.

    loading -> ready <-> restarting        failed: the pair or its settings cannot be served

A request goes to the engine process with the fewest requests; while none is ready (restarting), it
waits for the next one. The front keeps text, stop strings and the queue of grammars; sampling,
masks and metrics are in the processes (worker/).
"""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from peagle.core import Method
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.engines.method_choice import choose_engine
from peagle.server.front.add_message import add_message
from peagle.server.front.connection_pool import ConnectionPool
from peagle.server.front.engine_connection import EngineConnection
from peagle.server.front.front_request import FrontRequest, token_logprob
from peagle.server.front.generation_params import GenerationParams
from peagle.server.front.grammar_queue import GrammarQueue
from peagle.server.front.remote_slot import RemoteSlot
from peagle.server.front.state_source import StateSource
from peagle.server.front.target_text import TargetText
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.messages import Call, EngineKey, TargetInfo
from peagle.server.settings import ServerSettings
from peagle.server.tokenization.early_tokenizer import EarlyTokenizer
from peagle.server.tokenization.tokenizer_threads import TokenizerThreads

if TYPE_CHECKING:
    from peagle.engine.stream import Stream, TokenLogprob

ClientState = Literal["loading", "ready", "restarting", "failed", "closed"]
UNAVAILABLE: Mapping[ClientState, str] = {
    "ready": "the engine was closed just now",
    "loading": "the model is still loading",
    "restarting": "the engine stopped and is being started again",
    "failed": "the model could not be loaded",
    "closed": "the server is shutting down",
}
STATUS_WAIT_SECONDS = 1.0
READY_POLL_SECONDS = 0.05
RESTART_WAIT_SECONDS = 60.0  # The longest wait of a request for the next process.


class EngineClient:
    def __init__(self, settings: ServerSettings, source: StateSource) -> None:
        self.settings = settings
        self.source = source
        self.pool = ConnectionPool(self._take_target)
        self.target: TargetInfo | None = None
        self.text: TargetText | None = None
        self.on_failure: Callable[[str], None] = lambda reason: None
        # Raises an error when the server shuts down; set by the backend.
        self.check_accepting: Callable[[], None] = lambda: None
        # The queue of the next process gets all waiting requests at once, and holds so many.
        self.max_waiting = settings.share_of_front(settings.max_queue)
        max_requests = settings.share_of_front(settings.max_batch + settings.max_queue)
        self.tokenizer_threads = TokenizerThreads(max_requests)
        self.grammar_queue = GrammarQueue(max_requests)
        self._early_tokenizer = EarlyTokenizer(settings)
        self._ids = itertools.count(1)
        self._ended: Literal["failed", "closed"] | None = None
        self._loading: asyncio.Task[None] | None = None

    # --- the processes ----------------------------------------------------------------------------

    def start(self) -> None:
        # The front needs the tokenizer when the engines are ready, and has time until then.
        self._early_tokenizer.start()
        self.source.start(self.pool.update, self.fail)

    async def close(self) -> None:
        self._ended = "closed"
        self.pool.wake_arrivals()
        await self.source.close()
        self.pool.close()
        self.tokenizer_threads.close()
        self.grammar_queue.close()

    def fail(self, reason: str) -> None:
        """The model can never be served."""
        if self._ended is not None:
            return
        self._ended = "failed"
        self.pool.refuse_all(self.unavailable())
        self.pool.wake_arrivals()
        self.on_failure(reason)

    def _take_target(self, target: TargetInfo) -> None:
        self.target = target
        if self.text is not None:
            self.pool.send_waiting()
            self.pool.wake_arrivals()
        elif self._loading is None:
            self._loading = asyncio.ensure_future(self._load_text(target))

    async def _load_text(self, target: TargetInfo) -> None:
        try:
            self.text = await asyncio.to_thread(self.load_text, target)
            log_event("front ready", pid=os.getpid())
        except Exception as error:
            self.fail(str(error))

    def load_text(self, target: TargetInfo) -> TargetText:
        """Load the tokenizer; on a thread."""
        return TargetText.load(target, self._early_tokenizer)

    # --- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        if self._ended is not None:
            return self._ended
        if self.text is None:
            return "loading"
        return "ready" if self.pool.least_loaded() is not None else "restarting"

    def unavailable(self) -> ApiError:
        return ApiError(503, f"{UNAVAILABLE[self.state]}: try again later", retry_after=2)

    def require_ready(self) -> TargetText:
        if self.state != "ready":
            raise self.unavailable()
        return self.require_text()

    def require_loaded(self) -> TargetText:
        """The tokenizer, if requests are answered now or by the next process."""
        if self.state not in ("ready", "restarting"):
            raise self.unavailable()
        return self.require_text()

    def require_text(self) -> TargetText:
        """The tokenizer, which the front keeps while processes are replaced."""
        if self.text is None:
            raise self.unavailable()
        return self.text

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its answer; 0 while it is unknown."""
        return self.target.engine.context if self.target is not None else 0

    @property
    def key(self) -> EngineKey:
        return self.target.key if self.target else EngineKey("none", 0)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that a request may choose."""
        return tuple(self.target.methods) if self.target else ()

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until requests can be answered, but not for longer."""
        end = time.monotonic() + seconds
        while self.state != "ready" and time.monotonic() < end:
            await asyncio.sleep(READY_POLL_SECONDS)

    async def refresh(self) -> None:
        """Wait for a new status of every process, but not for long."""
        connections = self.pool.connections.values()
        await asyncio.gather(*(c.refresh(STATUS_WAIT_SECONDS) for c in connections))

    # --- requests ---------------------------------------------------------------------------------

    def choose(self, method: str | None, k: int | str | None) -> EngineKey:
        """The engine for a request that asks for this method and K; None: the server's own."""
        return choose_engine(method, k, self.key, self.methods, self.settings.k)

    async def _ready_connection(self, requests: int) -> EngineConnection:
        """The process for so many requests, which wait while it is replaced."""
        if self.state == "restarting" and self.pool.waiting + requests > self.max_waiting:
            from peagle.engine.schedule.queue import QueueFull

            raise ApiError(429, str(QueueFull(self.max_waiting)), retry_after=1)
        seconds = min(RESTART_WAIT_SECONDS, self.settings.timeout or RESTART_WAIT_SECONDS)
        end = time.monotonic() + seconds
        while self.state == "restarting" and (left := end - time.monotonic()) > 0:
            self.check_accepting()
            await self.pool.wait(requests, left)
        self.require_ready()
        connection = self.pool.least_loaded()
        assert connection is not None
        return connection

    async def _connection_of(self, slot: RemoteSlot) -> EngineConnection:
        """The process of a slot: another one, if it has ended while the request was prepared."""
        self.require_loaded()
        if slot.closed:
            slot.move_to(await self._ready_connection(1))
        return slot.connection

    @asynccontextmanager
    async def slot(self, key: EngineKey, requests: int = 1) -> AsyncIterator[RemoteSlot]:
        """The engine for this key, built if needed. It stays open while a request is prepared.

        `requests`: for so many, which wait while the process is replaced.
        """
        arrival = time.monotonic()
        connection = await self._ready_connection(requests)
        waited = time.monotonic() - arrival
        assert connection.link is not None and self.target is not None
        link = connection.link
        if key == self.key:
            yield RemoteSlot(key, self.target.engine, connection, link, waited)
            return
        call = Call(next(self._ids), "open", key)
        try:
            result = await connection.call(call)
            assert result.engine is not None
            yield RemoteSlot(key, result.engine, connection, link, waited)
        finally:
            if connection.link is link:
                connection.end_call(call.id)

    async def score(self, slot: RemoteSlot, ids: list[int], top: int) -> "list[TokenLogprob]":
        """The log-probabilities of ids[1:], with the `top` likeliest tokens of each."""
        connection = await self._connection_of(slot)
        result = await connection.call(Call(next(self._ids), "score", prompt=ids, top=top))
        return [token_logprob(entry) for entry in result.scores or []]

    async def add(
        self, slot: RemoteSlot, ids: list[int], params: GenerationParams
    ) -> "tuple[Stream, RequestTiming]":
        """Send a request, and wait until an engine has accepted it."""
        from peagle.engine.stream import Stream

        text = self.require_loaded()
        timing = RequestTiming(time.monotonic() - slot.waited)
        connection = await self._connection_of(slot)
        request_id = next(self._ids)
        stream = Stream(str(request_id), len(ids), lambda: self.pool.abort(request_id))
        request = FrontRequest(
            add_message(request_id, slot.key, ids, params),
            stream,
            timing,
            text.detokenizer(params, slot.context - len(ids)),
            text.stop_ids(params),
        )
        connection.send(request)
        try:
            async with asyncio.timeout(self.settings.timeout or None):
                await request.accepted
        except TimeoutError as error:
            self.pool.abort(request_id)
            raise ApiError(504, "the engine did not take the request in time") from error
        except asyncio.CancelledError:
            self.pool.abort(request_id)
            raise
        return stream, request.timing

"""RequestHandler: the requests of fronts, from their arrival to their tokens.

Everything happens on the driver's thread, but for grammars: those are compiled on other threads.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.grammar import CompiledGrammar
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.engines.extra_engines import closed_error
from peagle.server.http.errors import ApiError
from peagle.server.messages import Abort, Add, LogprobEntry, Output, ProbedGrammar
from peagle.server.worker.engine_builds import EngineBuilds
from peagle.server.worker.fronts import Front, WorkerRequest
from peagle.server.worker.refusal import refusal_of

if TYPE_CHECKING:
    from peagle.engine.stream import TokenLogprob

Store = Callable[[list[int], Sequence[int]], None]
MAX_GRAMMAR_BYTES = 1 << 30  # Memory of compiled grammars, cached or in use.
COMPILER_THREADS = 2


class RequestHandler:
    def __init__(self, pool: EnginePool, builds: EngineBuilds, store: Store | None) -> None:
        """`store` is called with requests that were answered and may be learned from."""
        self.pool = pool
        self.builds = builds
        self.store = store
        self._compilers = ThreadPoolExecutor(COMPILER_THREADS, "peagle-grammar")

    def add(self, front: Front, add: Add) -> None:
        if add.grammar is None:
            self._start(front, add, None)
            return
        front.preparing.add(add.id)
        future = self._compilers.submit(self._compile, add.grammar)
        future.add_done_callback(
            lambda done: self.pool.driver.submit(lambda: self._compiled(front, add, done))
        )

    def abort(self, front: Front, abort: Abort) -> None:
        front.preparing.discard(abort.id)
        request = front.requests.pop(abort.id, None)
        if request is not None:
            request.stream.on_piece(None)
            request.slot.engine.abort(request.stream.id, abort.reason)
            if abort.reason == "stop":  # The front has found a stop string.
                request.on_answered()

    def abort_all(self, front: Front) -> None:
        front.preparing.clear()
        for request_id in list(front.requests):
            self.abort(front, Abort(request_id))

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, entry: ProbedGrammar) -> CompiledGrammar:
        compiler = self.pool.require_ready().grammars
        compiled = compiler.cached(entry.grammar)
        if compiled is not None:
            return compiled
        if not compiler.make_room(entry.memory_bytes, MAX_GRAMMAR_BYTES):
            raise ApiError(
                429,
                "the grammars of running requests occupy too much memory: try again later",
                retry_after=5,
            )
        return compiler.compile_probed(entry.grammar, entry.probed, entry.memory_bytes)

    def _compiled(self, front: Front, add: Add, done: "Future[CompiledGrammar]") -> None:
        if add.id not in front.preparing:
            return  # The request was aborted.
        front.preparing.discard(add.id)
        error = done.exception()
        if error is not None:
            front.batch.refusals.append(refusal_of(add.id, error))
        else:
            self._start(front, add, done.result())

    def _start(self, front: Front, add: Add, grammar: CompiledGrammar | None) -> None:
        try:
            slot = self.pool.find(add.engine)
            if slot is None:
                self._build(front, add, grammar)
                return
        except Exception as error:
            front.batch.refusals.append(refusal_of(add.id, error))
            return
        self._start_on(front, add, grammar, slot)

    def _build(self, front: Front, add: Add, grammar: CompiledGrammar | None) -> None:
        """Build the engine of a request that waited for it in a process that has ended."""

        def built(done: "Future[EngineSlot]") -> None:
            if add.id not in front.preparing:
                return  # The request was aborted.
            front.preparing.discard(add.id)
            error = done.exception()
            if error is not None:
                front.batch.refusals.append(refusal_of(add.id, error))
            else:
                self._start_on(front, add, grammar, done.result())

        self.builds.start(add.engine, built)
        front.preparing.add(add.id)

    def _start_on(
        self, front: Front, add: Add, grammar: CompiledGrammar | None, slot: EngineSlot
    ) -> None:
        try:
            if slot.engine.closed:
                raise closed_error()
            slot.last_used = time.monotonic()
            name = f"{front.identity.hex()}-{add.id}"
            stream, timing = slot.add(name, add, grammar)
        except Exception as error:
            front.batch.refusals.append(refusal_of(add.id, error))
            return
        front.batch.accepted.append(add.id)
        request = WorkerRequest(slot, stream, timing)
        if self.store is not None and add.learn:
            request.on_answered = partial(self.store, add.prompt, stream.answer)
        front.requests[add.id] = request
        stream.on_piece(partial(collect, front, add.id, request))


def collect(front: Front, request_id: int, request: WorkerRequest) -> None:
    """Add the new pieces of a stream to the next message to its front."""
    from peagle.engine.stream import RequestRefused

    stream = request.stream
    outputs = front.batch.outputs
    try:
        for piece in stream.poll():
            if piece.step is not None:
                step = piece.step
                output = Output(request_id, list(step.tokens), step.drafted, step.accepted)
                if piece.logprobs:
                    output.logprobs = [logprob_entry(entry) for entry in piece.logprobs]
                outputs.append(output)
            if piece.reason is not None:
                end_output(outputs, request_id, piece.reason)
                if piece.reason in ("stop", "length"):
                    request.on_answered()
    except UserError as error:
        reason = "refused" if isinstance(error, RequestRefused) else "error"
        end_output(outputs, request_id, reason, str(error))
    if stream.ended:
        # It holds this function, which holds the stream. The collector, which is tuned to run
        # rarely, would keep thousands of prompts.
        stream.on_piece(None)


def end_output(
    outputs: list[Output], request_id: int, reason: str, error: str | None = None
) -> None:
    """Add the end of a request to its last tokens, or behind them."""
    if not outputs or outputs[-1].id != request_id or outputs[-1].reason is not None:
        outputs.append(Output(request_id))
    outputs[-1].reason = reason
    outputs[-1].error = error


def logprob_entry(entry: "TokenLogprob") -> LogprobEntry:
    return entry.token, entry.logprob, entry.rank, entry.top

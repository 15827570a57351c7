"""The engine: many requests at once, joining and leaving at every step.

    add -> queue -> plan (scheduler) -> prefill, decode (stepper) -> read back -> text -> stream

A thread runs step after step (loop.py). With `EngineConfig(thread=False)` the caller runs `step()`.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from peagle.catalog import DEFAULT_PAIR
from peagle.core import DRAFTER_METHODS, Method, Sampling, parse_method
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.drafter.replacement import check_replacement
from peagle.engine.admission import Admission, RequestOptions
from peagle.engine.config import EngineConfig
from peagle.engine.device import DeviceLost, is_device_lost
from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.loop import EngineLoop
from peagle.engine.metrics import Metrics
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.policy.engine_policies import choose_draft_policy, choose_ngram_policy
from peagle.engine.policy.step_drafts import StepDrafts
from peagle.engine.schedule.prompt_rules import PromptRules
from peagle.engine.schedule.request import FinishReason, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler
from peagle.engine.sizing import (
    build_stepper,
    check_int8,
    draft_shapes,
    engine_context,
    prompt_rules,
    scheduler_config,
    uses_ngrams,
)
from peagle.engine.step.exact_mode import (
    ExactChoice,
    ExactMode,
    enable_exact_mode,
    expects_exact_mode,
)
from peagle.engine.step.graph_backlog import GraphBacklog
from peagle.engine.step.startup_times import StartupTimes
from peagle.engine.step.step_measurements import ExpertLoad, expert_load, time_graphs
from peagle.engine.step.step_output import StepRecord
from peagle.engine.stream import Stream, StreamPiece
from peagle.engine.thinking import Thinking
from peagle.errors import UserError
from peagle.grammar import CompiledGrammar, Grammar
from peagle.kernels.cpu.library import kernel_state
from peagle.model_pair import ModelPair, Prompt, load_models

EXIT_SECONDS = 10.0  # for the step that runs when the program ends
_running: "weakref.WeakSet[Engine]" = weakref.WeakSet()  # engines with a thread


@atexit.register
def end_threads() -> None:
    """End engines that nobody closed: a thread inside a kernel would abort the ending program."""
    for engine in list(_running):
        engine._end_thread(EXIT_SECONDS)


class Engine:
    def __init__(
        self, pair: ModelPair | str = DEFAULT_PAIR, config: EngineConfig | None = None
    ) -> None:
        started = time.perf_counter()
        self.config = config = config or EngineConfig()
        if isinstance(pair, str):
            pair = load_models(pair, context=config.context)
        self.pair = pair
        self.target = pair.target
        self.method: Method = parse_method(config.method or pair.pair.method)
        drafter = self._drafter()
        self.ngram = uses_ngrams(config, self.method, pair)
        # The largest draft of the drafter, and of any kind.
        self.drafter_shape, self.max_shape = draft_shapes(
            config, pair, self.method, drafter, self.ngram
        )
        if config.int8:
            check_int8(self.target)
        self.context = engine_context(config, self.target)
        self._stepper = build_stepper(
            config, pair, drafter, self.max_shape, self.context, self.ngram
        )
        if config.int8:
            self._stepper.quantize()
        self.weights = "int8" if config.int8 else self._stepper.weights
        before = time.perf_counter()
        exact = self._enable_exact_mode()
        exact_seconds = time.perf_counter() - before
        self.exact_mode: ExactMode | None = exact.mode
        self.exact_reason = exact.reason  # Why requests do not share exact passes; None: they do.
        self._allocator = self._page_allocator()
        self._scheduler = Scheduler(
            self._allocator,
            scheduler_config(config, pair, self.max_shape, self.context, self._one_by_one),
        )
        self._admission = Admission(
            pair, prompt_rules(self._scheduler.context, self.context, self.target)
        )
        self.loop = self._build_loop()  # Internal: only the engine's own tests look inside.
        self.startup.add("build", time.perf_counter() - started - exact_seconds)
        if expects_exact_mode(config, self.target):
            self.startup.add("exact", exact_seconds)
        self._lock = self.loop.lock
        self._closed = False
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        if config.thread:
            self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
            self._thread.start()
            _running.add(self)

    def _drafter(self) -> Drafter | None:
        """The drafter of the method, with the window of the config."""
        if self.method not in DRAFTER_METHODS:
            return None
        return self._with_window(self.pair.drafter(self.method))

    def _with_window(self, drafter: Drafter) -> Drafter:
        window = self.config.drafter_window
        return drafter if window is None else drafter.with_window(window or None)

    # --- requests ---------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        min_tokens: int = 0,
        stop: tuple[str, ...] = (),
        stop_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        user: str = "",
        id: str | None = None,
        cache_salt: str = "",
        raw: bool = False,
        include_stop: bool = False,
        grammar: Grammar | CompiledGrammar | None = None,
        detokenize: bool = True,
        thinking: Thinking | None = None,
        **sampling: Any,
    ) -> Stream:
        """Queue a request. Its answer arrives through the stream and follows `grammar` if given.

        `cache_salt`: only requests with the same salt share prefixes in the KV cache.
        `detokenize` False: pieces have no text, for a caller that decodes the tokens itself.
        `thinking`: the part before the answer, with its budget; a grammar binds what follows it.
        `sampling`: the fields of `core.Sampling`.
        """
        sampling_settings = Sampling(**sampling).seeded()
        limits = RequestLimits(
            max_tokens, min_tokens, tuple(stop), frozenset(stop_ids), ignore_eos, logprobs
        )
        options = RequestOptions(
            sampling_settings,
            limits,
            include_stop,
            grammar,
            user,
            id,
            cache_salt,
            detokenize,
            thinking,
        )
        ids = list(self.pair.encode(prompt, raw))
        request, state = self._admission.prepare(ids, options, self.loop.abort_request)
        self._scheduler.hash_pages(request)  # Without the lock: it takes long for a long prompt.
        with self._lock:
            self._require_open()
            self.loop.add(request, state)
        return state.stream

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise UserError unless these token ids are a prompt that fits the context.

        The KV cache may hold less; `add` checks that too.
        """
        PromptRules(self.context, self.vocab_size).check(ids)

    def abort(self, id: str, reason: FinishReason = "abort") -> None:
        """End a request. Unknown or finished ids are ignored.

        `reason`: "stop" from a caller that has found a stop string itself.
        """
        self.loop.abort(id, reason)

    def fail(self, reason: str) -> Exception | None:
        """Close the engine after an error: every live request ends with `reason`.

        Returns the error that closing raised, if any; the requests end nevertheless.
        """
        self._failure = reason
        try:
            self.close()
        except Exception as error:
            return error
        return None

    # --- running ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step. Returns False if there was nothing to do.

        DeviceLost: the engine is closed, every request has failed, and the process must end.
        """
        self._require_open()
        try:
            return self.loop.run()
        except Exception as error:
            if not is_device_lost(error):
                raise
            lost = DeviceLost(f"the device is lost, start a new process: {first_line(error)}")
            self.fail(str(lost))
            raise lost from error
        finally:
            if self._closed:  # A listener of a stream closed the engine during this step.
                self._release()

    def drain(self) -> None:
        """Run until every request is answered; for engines without a thread."""
        while self.step():
            pass

    def warm_up(self, ready_batch: int | None = None) -> None:
        """Compile kernels and capture CUDA graphs before the first request.

        `ready_batch`: capture those of up to this many requests. The rest is left to
        `capture_next`, and to the steps that need them. None: all of them.
        """
        self.loop.warm_up(ready_batch)

    def compile_kernels(self) -> None:
        """Compile kernels for a GPU on several threads; graphs are captured as steps need them."""
        self.loop.warm_up(ready_batch=0)

    def capture_next(self) -> bool:
        """Capture one CUDA graph that warm-up has left, in some 50 ms, unless requests are live.

        Returns False if there was nothing to do. An engine with a thread does it by itself.
        """
        return self.loop.capture_next()

    def replace_drafter(self, drafter: Drafter, version: int = 0) -> None:
        """Draft with another version of the drafter from the next step on, from any thread.

        Requests go on, and answers stay what they are. CUDA graphs, the prefix cache and the
        drafter's part of the KV cache stay (docs/learn.md). `drafter` and the one before are not
        changed. `version`: shown by `status`.

        UserError, and nothing changes, if `drafter` differs in more than weights and calibration.
        """
        self._require_open()
        current = self._stepper.drafter
        if current is None:
            raise UserError(f"an engine with `method` {self.method} has no drafter to replace")
        drafter = self._with_window(drafter)
        check_replacement(current.drafter, drafter, self.target)
        self.loop.replace_drafter(drafter, version)

    def close(self) -> None:
        """Fail the requests that are not answered yet, and free the engine's memory.

        Whoever still holds a stream of it, such as a client that reads slowly, holds no KV cache,
        packed weights or graphs.
        """
        try:
            with self._lock:
                if not self._closed:
                    self._closed = True
                    self._lock.notify_all()  # The thread goes on when the lock is released.
                    self._fail_requests(self._failure or "the engine was closed")
        finally:
            self._release()

    def _end_thread(self, seconds: float) -> None:
        """Let the engine's thread end behind its step, if that takes no longer than this."""
        if self._thread is None:
            return
        if self._lock.acquire(timeout=seconds):
            self._closed = True
            self._lock.notify_all()
            self._lock.release()
        self._thread.join(seconds)

    def _release(self) -> None:
        """Free memory, once no step is running; a step that closes its own engine does it later."""
        current = threading.current_thread()
        if self.loop.stepping_thread is current or self._thread is current:
            return
        if self._thread is not None:
            self._thread.join()
        self.loop.release()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- state, for servers and benchmarks --------------------------------------------------------

    @property
    def metrics(self) -> Metrics:
        return self.loop.metrics

    @property
    def startup(self) -> StartupTimes:
        """The time of each phase of the start, which a caller may complete."""
        return self.loop.startup

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet, or a launched pass is not read back yet."""
        return self.loop.busy

    @property
    def live_requests(self) -> int:
        return len(self._scheduler.live)

    @property
    def waiting_requests(self) -> int:
        with self._lock:
            return len(self._scheduler.waiting)

    def is_waiting(self, id: str) -> bool:
        """Whether this request is still in the queue, before its first step."""
        request = self._scheduler.live.get(id)
        return request is not None and request.status == "waiting"

    @property
    def drafter_version(self) -> int:
        """The version of the drafter, as `replace_drafter` was told; 0: the pair's own."""
        return self.loop.drafter_version

    @property
    def max_batch(self) -> int:
        return self.config.max_batch

    @property
    def max_k(self) -> int:
        return self.max_shape.k

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def shape(self, nodes: int) -> DraftShape:
        """The shape with this many nodes: a chain, if a chain can be that long."""
        return DraftShape(min(nodes, self.max_k), nodes)

    def status(self) -> dict[str, Any]:
        """Counters and gauges, for people and for /metrics."""
        with self._lock:
            allocator = self._allocator
            scheduler = self._scheduler
            choice = self.target.speed_choice
            return self.metrics.as_dict() | {
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.running),
                "kv_usage": 1 - allocator.num_free / allocator.num_pages,
                "preemptions": scheduler.preemptions,
                "method": self.method,
                "drafter_version": self.loop.drafter_version,
                "exact": self.exact,
                "exact_mode": self.exact_mode,
                "exact_reason": self.exact_reason,
                "int8": self.config.int8,
                "weights": self.weights,
                "kernels": "triton" if self._on_gpu else kernel_state(),
                "dtype": str(self.target.dtype).removeprefix("torch."),
                "dtype_choice": None if choice is None else choice.as_dict(),
                "prefix_queries": allocator.queried_tokens,
                "prefix_hits": allocator.hit_tokens,
                "kv_tokens": allocator.num_pages * allocator.page_size,
                "context": self.context,
                "k_most": self.max_k,
                "startup": self.startup.as_dict(),
                "pending_graphs": len(self.loop.graphs.backlog),
            }

    def on_step(self, hook: Callable[[StepRecord], None] | None) -> None:
        """Call `hook` with a record of every decode step from now on; None removes it."""
        self.loop.step_hook = hook

    def time_step(self, batch: int, shape: DraftShape) -> tuple[float | None, float | None]:
        """Milliseconds of the two CUDA graphs of a step: verification, acceptance with drafting.

        The rows are those of the last requests; none may be live.
        """
        return time_graphs(self._stepper, batch, shape)

    def expert_load(self, batch: int, shape: DraftShape) -> ExpertLoad | None:
        """The experts that a verification touches, with the rows of the last requests.

        None for a target without experts. No request may be live.
        """
        return expert_load(self._stepper, batch, shape)

    def force_acceptance(self, probabilities: list[float]) -> None:
        """For measurements: accept draft i of a chain with this probability, given those before.

        Trees accept more (engine/sampling/forced_acceptance.py). Call it before `warm_up`.
        """
        self._stepper.force_acceptance(probabilities)

    def check_integrity(self) -> None:
        """Assert that pages, slots and requests agree."""
        self.loop.check_integrity()

    @property
    def idle(self) -> bool:
        """Whether no request is live and every KV page is free."""
        return not self.busy and self._allocator.num_free == self._allocator.num_pages

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_steps()
        finally:
            self.loop.release()

    def _run_steps(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self.busy and not self.loop.graphs.backlog:
                    self._lock.wait()
                if self._closed:
                    return
            try:
                if not self.capture_next():
                    self.step()
            except Exception as error:  # Waiting callers must learn of it.
                with self._lock:
                    if not self._closed:
                        self._failure = f"the engine stopped: {type(error).__name__}: {error}"
                        self._closed = True
                        self._fail_requests(self._failure)
                return

    def _fail_requests(self, reason: str) -> None:
        """End all streams, also those whose requests the bookkeeping fails to end."""
        try:
            self.loop.fail_all(reason)
        finally:
            for state in list(self.loop.states.values()):
                state.stream.put(StreamPiece(None, reason="error", error=reason))

    def _require_open(self) -> None:
        if self._closed:
            raise UserError(self._failure or "the engine is closed: create a new one")

    # --- set-up -----------------------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return self.target.device.type == "cuda"

    @property
    def _uses_graphs(self) -> bool:
        return self.config.cuda_graphs and self._on_gpu

    @property
    def exact(self) -> bool:
        """Whether answers are bit-equal with and without drafts and other requests."""
        return self.exact_mode is not None

    @property
    def _one_by_one(self) -> bool:
        return self.exact_mode == "one by one"

    def _enable_exact_mode(self) -> ExactChoice:
        if expects_exact_mode(self.config, self.target):
            self._start_compiling()
        exact = enable_exact_mode(self.config, self._stepper, self.max_shape)
        if exact.max_shape != self.max_shape:
            self.max_shape, self.drafter_shape = exact.max_shape, self.drafter_shape.as_chain()
        return exact

    def _start_compiling(self) -> None:
        """On a GPU, let the kernels of steps compile while exact mode is probed."""
        verifier = self._stepper.verifier
        if not self._uses_graphs or not isinstance(verifier, FusedLlamaTarget):
            return
        policy = choose_draft_policy(self.config, self.method, self.drafter_shape)
        backlog = GraphBacklog(
            self._stepper, policy, self.max_shape, self.drafter_shape, StartupTimes()
        )
        backlog.fill(self.config.max_batch, ready_batch=0)
        with verifier.assumed_batch_invariant():
            backlog.compile(wait=False)

    def _build_loop(self) -> EngineLoop:
        policy = choose_draft_policy(self.config, self.method, self.drafter_shape)
        ngram = choose_ngram_policy(policy, self._stepper, self.max_shape)
        return EngineLoop(
            self._stepper,
            self._scheduler,
            StepDrafts(policy, ngram, self._stepper),
            self.max_shape,
            self.drafter_shape,
            self._one_by_one,
            self._uses_graphs,
        )

    def _page_allocator(self) -> PageAllocator:
        # One by one, pages that other passes have computed may have other bits.
        caching = self.config.prefix_caching and not self._one_by_one
        return PageAllocator(
            self._stepper.kv_cache.num_pages, self.config.page_size, caching=caching
        )


def first_line(error: Exception) -> str:
    """CUDA errors continue with hints for debugging."""
    return str(error).partition("\n")[0]

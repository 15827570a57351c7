"""The engine: many requests at once, joining and leaving at every step.

    add -> queue -> plan (scheduler) -> prefill, decode (stepper) -> read back -> detokenize -> stream

A thread runs step after step (loop.py). With `EngineConfig(thread=False)` the caller runs `step()`.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from peagle.catalog import DEFAULT_PAIR
from peagle.core import Method, Sampling, parse_method
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.engine.config import EngineConfig
from peagle.engine.detokenizer import Detokenizer, token_decoder
from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.loop import EngineLoop, RequestState
from peagle.engine.metrics import Metrics
from peagle.engine.model.exactness import exact_multiple
from peagle.engine.policy.adaptive import AdaptivePolicy, DraftPolicy, FixedPolicy, candidate_shapes
from peagle.engine.sampling.grammar_masks import GrammarState
from peagle.engine.sampling.sampling_state import check_bias
from peagle.engine.schedule.request import Request, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler
from peagle.engine.sizing import build_stepper, check_int8, largest_shape
from peagle.engine.step.step_output import StepRecord
from peagle.engine.stream import Stream, StreamPiece
from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.kernels.cpu.library import kernel_state
from peagle.model_pair import ModelPair, Prompt, load_models

GPU_PREFILL_CHUNK = 4096
CPU_PREFILL_CHUNK = 512


class Engine:
    def __init__(
        self, pair: ModelPair | str = DEFAULT_PAIR, config: EngineConfig | None = None
    ) -> None:
        self.config = config = config or EngineConfig()
        self.pair = pair = load_models(pair) if isinstance(pair, str) else pair
        self.target = pair.target
        if config.int8:
            check_int8(self.target)
        self.method: Method = parse_method(config.method or pair.pair.method)
        drafter = None if self.method == "none" else pair.drafter(self.method)
        self.largest = largest_shape(config, pair, drafter)
        self.context = min(config.context or self.target.context, self.target.context)
        self._stepper = build_stepper(config, pair, drafter, self.largest, self.context)
        if config.int8:
            self._stepper.quantize()
        self.weights = "int8" if config.int8 else self._stepper.weights
        self.exact = self._enable_exact()
        self._pages = self._page_allocator()
        self._scheduler = self._make_scheduler()
        self.loop = EngineLoop(  # Internal: only the engine's own tests look inside.
            self._stepper,
            self._scheduler,
            self._policy(drafter),
            self.largest,
            self.exact,
            config.cuda_graphs and self._on_gpu,
        )
        self._lock = self.loop.lock
        self._ids = itertools.count()
        tokenizer = self.target.tokenizer
        self._decoder = None if tokenizer is None else token_decoder(tokenizer)
        self._closed = False
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        if config.thread:
            self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
            self._thread.start()

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
        raw: bool = False,
        include_stop: bool = False,
        grammar: Grammar | None = None,
        **sampling: Any,
    ) -> Stream:
        """Queue a request. Its answer arrives through the stream and follows `grammar` if given.

        `sampling`: the fields of `core.Sampling`.
        """
        if grammar is not None and ignore_eos:
            raise UserError("`ignore_eos` does not go with a grammar: the grammar ends the answer")
        settings = Sampling(**sampling).seeded()
        ids = list(self.pair.encode(prompt, raw))
        self.check_prompt(ids)
        check_bias(settings, self.vocab_size)
        limits = RequestLimits(
            max_tokens, min_tokens, tuple(stop), frozenset(stop_ids), ignore_eos, logprobs
        )
        room = max(self.context - len(ids), 1)  # The context bounds the answer.
        limits = replace(limits, max_tokens=min(max_tokens, room), min_tokens=min(min_tokens, room))
        detokenizer = Detokenizer(self._decoder, limits.stop, include_stop, limits.min_tokens)
        stop_tokens = limits.stop_ids | (frozenset() if ignore_eos else self.target.stop_ids)
        grammar_state = None
        if grammar is not None:
            grammar_state = GrammarState(
                self.pair.grammars, grammar, stop_tokens, limits.min_tokens
            )
        with self._lock:
            self._require_open()
            request = Request(id or f"r{next(self._ids)}", ids, settings, limits, user)
            self._scheduler.add(request)
            stream = Stream(request.id, len(ids), self.abort)
            self.loop.states[request.id] = RequestState(
                stream, detokenizer, stop_tokens, grammar_state
            )
            self.metrics.prompt_tokens += len(ids)
            self._lock.notify_all()
        return stream

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise UserError unless these token ids are a prompt that fits the context."""
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        if len(ids) >= self.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but with one token of the answer it must fit"
                f" into {self.context} tokens of context: shorten it"
            )
        if bad := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise UserError(
                f"token ids {bad[:5]} are outside the target's vocabulary of {self.vocab_size}"
            )

    def abort(self, id: str) -> None:
        """End a request. Unknown or finished ids are ignored."""
        with self._lock:
            request = self._scheduler.live.get(id)
            if request is not None:
                self.loop.finish(request, "abort")

    def fail(self, reason: str) -> Exception | None:
        """Close the engine after an error: every live request ends with `reason`.

        Returns the error that closing raised, if any: requests are told nevertheless.
        """
        self._failure = reason
        try:
            self.close()
        except Exception as error:
            self._closed = True
            for state in list(self.loop.states.values()):
                state.stream.put(StreamPiece(None, reason="error", error=reason))
            return error
        return None

    # --- running ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step. Returns False if there was nothing to do."""
        self._require_open()
        return self.loop.run()

    def drain(self) -> None:
        """Run until every request is answered; for engines without a thread."""
        while self.step():
            pass

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs before the first request."""
        self.loop.warm_up()

    def close(self) -> None:
        """Fail the requests that are not answered yet."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.loop.fail_all(self._failure or "the engine was closed")
            self._lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- state, for servers and benchmarks --------------------------------------------------------

    @property
    def metrics(self) -> Metrics:
        return self.loop.metrics

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet, or a launched pass is not read back yet."""
        return bool(self._scheduler.live or self.loop.in_flight)

    @property
    def live_requests(self) -> int:
        return len(self._scheduler.live)

    def is_waiting(self, id: str) -> bool:
        """Whether this request is still in the queue, before its first step."""
        request = self._scheduler.live.get(id)
        return request is not None and request.status == "waiting"

    @property
    def max_batch(self) -> int:
        return self._scheduler.max_batch

    @property
    def max_k(self) -> int:
        return self.largest.k

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def shape(self, nodes: int) -> DraftShape:
        """The shape with this many nodes: a chain, if a chain can be that long."""
        return DraftShape(min(nodes, self.max_k), nodes)

    def status(self) -> dict[str, Any]:
        """Counters and gauges, for people and for /metrics."""
        with self._lock:
            pages, scheduler = self._pages, self._scheduler
            return self.metrics.as_dict() | {
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.running),
                "kv_usage": 1 - pages.free / pages.count,
                "preemptions": scheduler.preemptions,
                "method": self.method,
                "exact": self.exact,
                "int8": self.config.int8,
                "weights": self.weights,
                "kernels": "triton" if self._on_gpu else kernel_state(),
                "prefix_queries": pages.asked,
                "prefix_hits": pages.found,
                "kv_tokens": pages.count * pages.size,
                "context": self.context,
                "k_most": self.max_k,
            }

    def on_step(self, hook: Callable[[StepRecord], None] | None) -> None:
        """Call `hook` with a record of every decode step from now on; None removes it."""
        self.loop.step_hook = hook

    def time_step(self, batch: int, shape: DraftShape) -> tuple[float | None, float | None]:
        """Milliseconds of the two CUDA graphs of a step: verification, acceptance with drafting."""
        return self._stepper.split(batch, shape)

    def force_acceptance(self, probabilities: list[float]) -> None:
        """For measurements: draft i is accepted with this probability, given the ones before."""
        self._stepper.force(probabilities)

    def check_integrity(self) -> None:
        """Assert that pages, slots and requests agree."""
        with self._lock:
            self._scheduler.check_integrity()
            states = self.loop.states
            assert states.keys() == self._scheduler.live.keys(), "states and requests differ"
            slots = [state.place for state in states.values() if state.place is not None]
            assert len(slots) == len(set(slots)) == self._stepper.places.taken, "slots are lost"
            finished = self.metrics.finished.total()
            assert finished + len(self._scheduler.live) == self._scheduler.added

    @property
    def idle(self) -> bool:
        """Whether no request is live and every KV page is free."""
        return not self.busy and self._pages.free == self._pages.count

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self.busy:
                    self._lock.wait()
                if self._closed:
                    return
            try:
                self.step()
            except Exception as error:  # Waiting callers must learn of it.
                with self._lock:
                    if not self._closed:
                        self._failure = f"the engine stopped: {type(error).__name__}: {error}"
                        self._closed = True
                        self.loop.fail_all(self._failure)
                return

    def _require_open(self) -> None:
        if self._closed:
            raise UserError(self._failure or "the engine is closed: create a new one")

    # --- set-up -----------------------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return self.target.device.type == "cuda"

    def _enable_exact(self) -> bool:
        """Whether exact mode is on; it fills passes up to a multiple of rows."""
        wanted = self.config.exact
        if wanted is None and not self.largest.chain:
            return False
        enabled = self.target.dtype != torch.float32 if wanted is None else wanted
        if not enabled:
            return False
        multiple = exact_multiple(
            self._stepper.verifier, self.target, self.config.page_size, self.max_k
        )
        if multiple is None and wanted:
            raise UserError(
                f"exact mode is not supported for {self.target.name!r}: rows depend on other rows of"
                " the batch (as in mixtures of experts). Leave out `exact` and set `dtype` to"
                " float32: a near tie is unlikely there"
            )
        self._stepper.multiple = multiple or 1
        return multiple is not None

    def _page_allocator(self) -> PageAllocator:
        caching = self.config.prefix_caching and not self.exact
        kv_cache = self._stepper.memory
        return PageAllocator(kv_cache.pages, self.config.page_size, caching=caching)

    def _make_scheduler(self) -> Scheduler:
        config, nodes = self.config, self.largest.nodes
        chunk = config.prefill_chunk or (GPU_PREFILL_CHUNK if self._on_gpu else CPU_PREFILL_CHUNK)
        if self.exact:  # A prompt in chunks would get bits that depend on other requests.
            chunk = self.context * config.max_batch
        return Scheduler(
            self._pages,
            config.max_batch,
            chunk,
            config.max_queue,
            self.context,
            slack=nodes,
            reserve=self.exact,
            spare=0 if self.largest.chain else nodes,
        )

    def _policy(self, drafter: Drafter | None) -> DraftPolicy:
        if self.config.k != "auto" or drafter is None:
            return FixedPolicy(self.largest)
        nodes = 0 if self.largest.chain else self.largest.nodes
        return AdaptivePolicy(candidate_shapes(self.max_k, nodes))

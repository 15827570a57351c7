"""EngineLoop: plan a step, launch it, read back the one before, deliver its results.

On a GPU the device always has work while the host runs. On a CPU there is nothing to overlap, and
each step is read back at once. So is a step with a grammar: the next masks depend on its tokens.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.drafter import Drafter
from peagle.engine.batch import BatchEntry, grammar_masks, max_logprobs
from peagle.engine.in_flight import InFlightPass
from peagle.engine.kv.slots import PageTableUpdate
from peagle.engine.metrics import Metrics
from peagle.engine.output_processor import OutputProcessor
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.step_drafts import StepDrafts
from peagle.engine.request_state import RequestState
from peagle.engine.sampling.batch_sampling import BatchSampling
from peagle.engine.sampling.sampler_cache import SamplerCache
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.engine.schedule.request import FinishReason, PrefillChunk, Request
from peagle.engine.schedule.scheduler import Scheduler, StepPlan
from peagle.engine.step.graph_backlog import GraphBacklog
from peagle.engine.step.startup_times import StartupTimes
from peagle.engine.step.step_graphs import StepGraphs
from peagle.engine.step.step_lock import StepLock
from peagle.engine.step.step_output import StepRecord
from peagle.engine.step.stepper import Stepper
from peagle.errors import UserError
from peagle.kernels.cpu.threads import threads_for_kernels

T = TypeVar("T")


class EngineLoop:
    def __init__(
        self,
        stepper: Stepper,
        scheduler: Scheduler,
        drafts: StepDrafts,
        max_shape: DraftShape,
        drafter_shape: DraftShape,
        one_by_one: bool,
        use_graphs: bool,
    ) -> None:
        """`max_shape`: no draft exceeds it, in depth or in nodes; `drafter_shape`: of the drafter.

        `one_by_one`: every request has its own passes, for exact mode without batch-invariant
        kernels.
        """
        self.stepper = stepper
        self.scheduler = scheduler
        self.drafts = drafts
        self.max_shape = max_shape
        self.drafter_shape = drafter_shape
        self.one_by_one = one_by_one
        self.startup = StartupTimes()
        backlog = GraphBacklog(stepper, drafts.policy, max_shape, drafter_shape, self.startup)
        self.graphs = StepGraphs(stepper, backlog, use_graphs)
        self.lock = threading.Condition()  # Guards everything here except the device's work.
        # Steps run one after the other, whichever threads call `run`.
        self._step_lock = StepLock()
        self.stepping_thread: threading.Thread | None = None  # The one that runs a step now.
        self._released = False
        self.drafter_version = 0
        self.metrics = Metrics(k=max_shape.k)
        self.outputs = OutputProcessor(stepper, scheduler, self.metrics)
        self.states = self.outputs.states
        self.in_flight: deque[InFlightPass] = deque()
        self.lookahead = 1 if stepper.slots.device.type == "cuda" else 0
        self.step_hook: Callable[[StepRecord], None] | None = None
        # The drafter may read further ahead than the target.
        self._step_rows = max(max_shape.nodes + 1, max_shape.k + drafter_shape.k)
        self._samplers = SamplerCache(max_shape.nodes + 1)
        self._last_read = 0.0

    # --- requests ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet, or a launched pass is not read back yet."""
        return bool(self.scheduler.live or self.in_flight)

    def add(self, request: Request, state: RequestState) -> None:
        with self.lock:
            self.scheduler.add(request)
            self.states[request.id] = state
            self.metrics.prompt_tokens += len(request.prompt)
            self.lock.notify_all()

    def abort(self, id: str, reason: FinishReason = "abort") -> None:
        """End a request. Unknown or finished ids are ignored."""
        with self.lock:
            request = self.scheduler.live.get(id)
            if request is not None:
                self.outputs.finish(request, reason)

    def abort_request(self, request: Request) -> None:
        """End this request, unless it has finished; another one may have its id by now."""
        with self.lock:
            if self.scheduler.live.get(request.id) is request:
                self.outputs.finish(request, "abort")

    def fail_all(self, reason: str) -> None:
        """End every live request with an error; no pass may run after this.

        The device is not touched, because it may be lost: pages are not overwritten.
        """
        for request in list(self.scheduler.live.values()):
            self.outputs.finish(request, "error", reason)

    def release(self) -> None:
        """Drop everything that holds device memory, after the last request. No step may follow."""
        with self._step_lock:
            self._released = True
            self.in_flight.clear()
            self._samplers.clear()
            self.step_hook = None
            self.graphs.backlog.clear()
            self.stepper.release()

    def replace_drafter(self, drafter: Drafter, version: int) -> None:
        """Draft with another version of the drafter from the next step on."""
        if self.stepping_thread is threading.current_thread():
            raise UserError("a step is running: replace the drafter between two steps")
        runner = self.stepper.draft_runner(drafter)
        with self._step_lock:
            if not self._released:
                self.stepper.replace_drafter(drafter, runner)
                self.drafter_version = version

    def check_integrity(self) -> None:
        """Assert that pages, slots and requests agree."""
        with self.lock:
            self.scheduler.check_integrity()
            assert self.states.keys() == self.scheduler.live.keys(), "states and requests differ"
            used = [state.slot for state in self.states.values() if state.slot is not None]
            assert len(used) == len(set(used)) == self.stepper.slots.num_used, "slots are lost"
            finished = self.metrics.finished.total()
            assert finished + len(self.scheduler.live) == self.scheduler.num_added

    # --- one step ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Launch one step and read back what is due. Returns False if there was nothing to do."""
        with self._step_lock:
            if self._released:
                return False
            self.stepping_thread = threading.current_thread()
            try:
                with threads_for_kernels(self.stepper.runs_in_c):
                    return self._run()
            finally:
                self.stepping_thread = None

    def _run(self) -> bool:
        plan = StepPlan()
        try:
            with self.lock:  # One block: no request ends between the plan and its slot.
                plan = self._plan()
                updates: list[PageTableUpdate] = []
                chunks = [(chunk, self._enter(chunk.request, updates)) for chunk in plan.prefill]
                entries = [self._enter(request, updates) for request in plan.decode]
                self.stepper.slots.write_tables(updates, self.stepper.kv_cache.discard_page)
            return self._run_passes(chunks, entries)
        except BaseException:
            with self.lock:
                for request in self.scheduler.cancel_prefill(plan):
                    self.outputs.release_slot(self.states[request.id])
            raise

    def _run_passes(
        self, chunks: list[tuple[PrefillChunk, BatchEntry]], entries: list[BatchEntry]
    ) -> bool:
        for chunk_group in self._groups(chunks):
            self._prefill(chunk_group)
        for group in self._groups(entries):
            self._decode(group, alone=not chunks)
        worked = bool(chunks or entries)
        is_bound = any(
            entry.state.constraint for entry in (*entries, *(entry for _, entry in chunks))
        )
        while self.in_flight and (len(self.in_flight) > self.lookahead or is_bound or not worked):
            self._read_back(self.in_flight.popleft())
            worked = True
        return worked

    def _plan(self) -> StepPlan:
        plan = self.scheduler.plan(self._step_rows)
        for request in plan.preempted:
            self.outputs.release_slot(self.states[request.id])
        return plan

    def _groups(self, items: list[T]) -> list[list[T]]:
        """The passes of a step."""
        if self.one_by_one:
            return [[item] for item in items]
        return [items] if items else []

    def _enter(self, request: Request, updates: list[PageTableUpdate]) -> BatchEntry:
        """Put a request into the batch; `updates` collects what the device must learn of it."""
        state = self.states[request.id]
        slot = state.slot
        if slot is None:
            slot = self._assign_slot(request, state)
        if state.known_pages < len(request.pages):
            updates.append(self._page_table_update(request, state, slot))
        return BatchEntry(request, state, slot)

    def _assign_slot(self, request: Request, state: RequestState) -> int:
        limits = request.limits
        target = self.stepper.target
        has_grammar = state.constraint is not None and state.constraint.grammar is not None
        slot = self.stepper.slots.allocate()
        state.slot = slot
        state.known_pages = 0
        state.draft_shape = NO_DRAFT
        state.sampling_state = SamplingState(
            request.sampling,
            request.prompt,
            limits.max_tokens + self.max_shape.k + 1,
            vocab=target.vocab_size,
            device=target.device,
            min_tokens=0 if has_grammar else limits.min_tokens,
            stop_ids=state.stop_ids,
            output=request.output,
        )
        state.ngram = None
        self.stepper.enter(slot, request)
        self.metrics.cached_tokens += request.cached
        if state.stream.cached_tokens is None:
            # A preempted request finds its own pages when it returns: those do not count.
            state.stream.cached_tokens = request.cached
        self._samplers.clear()  # A preempted request returns with a new sampling state.
        return slot

    def _page_table_update(
        self, request: Request, state: RequestState, slot: int
    ) -> PageTableUpdate:
        pages = request.pages
        shared = request.cached // self.scheduler.allocator.page_size
        new_pages = pages[max(state.known_pages, shared) :]
        self.stepper.kv_cache.reset_pages(
            new_pages, self.scheduler.allocator.take_unverified(new_pages)
        )
        answer_end = len(request.prompt) + request.limits.max_tokens + self.max_shape.k
        state.known_pages = len(pages)
        return PageTableUpdate(slot, min(self.scheduler.context, answer_end), pages)

    def _prefill(self, chunks: list[tuple[PrefillChunk, BatchEntry]]) -> None:
        started = time.perf_counter()
        new = [entry for chunk, entry in chunks if chunk.next_id is None]
        draft_shape = self.drafter_shape  # The next step may verify a part of it.
        output = self.stepper.prefill.run(
            [chunk for chunk, _ in chunks],
            [entry.slot for _, entry in chunks],
            draft_shape,
            BatchSampling(self._samplers.sampler(new), grammar_masks(new), max_logprobs(new)),
            self.graphs.enabled,
        )
        with self.lock:
            for chunk, entry in chunks:
                entry.state.draft_shape = draft_shape
                entry.state.draft_confidence = None
                if not chunk.request.finished:
                    self.scheduler.mark_prefilled(chunk)
            self.drafts.read_ngrams([entry for _, entry in chunks])
        if output is not None:
            requests = [entry.request for entry in new]
            self._start_read_back(InFlightPass(requests, output, is_prefill=True))
        self.metrics.prefill_passes += 1
        self.metrics.prefill_seconds += time.perf_counter() - started

    def _decode(self, entries: list[BatchEntry], alone: bool) -> None:
        """Launch a decode step; `alone`: no prefill runs in the same step."""
        masks = grammar_masks(entries)
        shape, draft_shape, choice = self.drafts.choose(entries, masks is not None, alone)
        self.metrics.show_choice(choice)
        started = time.perf_counter()
        draft_shape = self.graphs.prepare_step(len(entries), shape, draft_shape, self.drafter_shape)
        sampling = BatchSampling(self._samplers.sampler(entries), masks, max_logprobs(entries))
        slots = [entry.slot for entry in entries]
        ngram_step = self.drafts.start_ngram_step(entries)
        counts = ngram_step.draft_counts if ngram_step is not None else None
        output = self.stepper.decode(slots, shape, draft_shape, sampling, counts)
        confidence: list[list[float] | None] = [None] * len(entries)
        if output.draft_confidence is not None:
            confidence = output.draft_confidence.tolist()
        with self.lock:
            for entry, entry_confidence in zip(entries, confidence, strict=True):
                entry.request.ahead += shape.k + 1
                entry.state.draft_shape = draft_shape
                entry.state.draft_confidence = entry_confidence
            self.drafts.read_ngrams(entries)
        requests = [entry.request for entry in entries]
        launched = InFlightPass(requests, output, shape, started=started)
        # A padded step says nothing about the costs of its own batch size.
        padded = self.graphs.is_padded(len(entries), shape, draft_shape)
        launched.timed = alone and shape == draft_shape and not padded
        if ngram_step is not None:
            ngram_step.catches_up = all(entry.uses_ngram for entry in entries)
            launched.ngram = ngram_step
            # With n-gram drafts only, the drafter drafts nothing, whatever the shape is.
            launched.timed = alone and (
                ngram_step.is_pure
                if any(ngram_step.used)
                else shape == draft_shape and (ngram_step.is_pure or not ngram_step.catches_up)
            )
        if not self.stepper.on_gpu:
            launched.seconds = time.perf_counter() - started
        self._start_read_back(launched)
        self.metrics.steps += 1
        self.metrics.k_steps[shape.nodes] += 1

    # --- read-back --------------------------------------------------------------------------------

    def _start_read_back(self, launched: InFlightPass) -> None:
        launched.start_copy()
        self.in_flight.append(launched)

    def _read_back(self, launched: InFlightPass) -> None:
        """Wait for a pass, and deliver its results."""
        launched.wait()
        now = time.perf_counter()
        with self.lock:
            accepted = self.outputs.deliver(launched)
        if not launched.is_prefill:
            seconds = launched.seconds
            if seconds is None:
                seconds = now - max(launched.started, self._last_read)
            self._record_step(launched, seconds, accepted)
        self._last_read = now

    def _record_step(
        self, launched: InFlightPass, seconds: float, accepted: list[AcceptedCounts | None]
    ) -> None:
        batch = len(launched.requests)
        output = launched.output
        self.metrics.step_seconds += seconds
        if self.step_hook is not None:
            self.step_hook(
                StepRecord(
                    batch, launched.shape, seconds, output.verify_seconds, output.draft_seconds
                )
            )
        self.drafts.observe(launched, seconds, accepted)

    # --- CUDA graphs ------------------------------------------------------------------------------

    def warm_up(self, ready_batch: int | None = None) -> None:
        """Compile kernels, and capture CUDA graphs: see `Engine.warm_up`."""
        max_batch = self.scheduler.config.max_batch
        with self._step_lock:
            if not self._released:
                self.graphs.warm_up(max_batch, ready_batch)
        with self.lock:
            self.lock.notify_all()  # A thread of the engine goes on with the rest.

    def capture_next(self) -> bool:
        """Capture one graph more: see `Engine.capture_next`."""
        with self._step_lock:
            if not self.graphs.enabled or self._released:
                self.graphs.backlog.clear()
            return not self.busy and self.graphs.capture_next()

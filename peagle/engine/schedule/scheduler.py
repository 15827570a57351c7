"""Scheduler: which requests run in the next step, and with which pages.

    add -> waiting -> (admitted) prefill -> decode -> finished
              ^----- preempted -----'---------'

The engine's loop calls `plan`, launches the plan, and calls `mark_prefilled` for each chunk. When
results are read back it calls `append_first` for the first token of an answer, `append` for the
tokens of a step, and `finish`. It may plan again before it has read back: at launch it adds to
`request.ahead` the maximum number of tokens that the step may emit, and subtracts it at read-back.
Results of a request that has finished meanwhile are dropped: its pages have a new owner, whose
passes run later on the device.

* Running requests are served in the order of admission. A request that lacks pages takes them from
  the request admitted last. The oldest request may take every page, so it always makes progress.
* A preempted request keeps its output and goes to the front of the queue. Its tokens are computed
  again up to `prefill_end`, except for those still in the prefix table. A request with a pass in
  flight is never preempted; if only such requests have pages to give, the plan stays short, and the
  loop must read back before it plans again.
* A waiting request is admitted when all running requests have the pages for this step, and the
  free pages hold everything the new one has to compute, one decode step included. No request
  overtakes the first one in the queue.
* The pages that a chunk fills are published when it is planned, and requests admitted behind it, in
  the same plan or later, share them: `n` choices of one prompt compute it once. A prefill pass
  stores the keys and values of all its rows before its attention reads them, layer by layer
  (`RowPass.reads_new_keys`). A decode pass writes only behind the published pages.
* No request gets pages beyond `max_length`, except for `answer_slack`. A row whose position has no
  page must not be stored, and its result is cut.
"""

from collections import Counter
from dataclasses import dataclass, field

from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.kv.page_keys import page_key, root_key
from peagle.engine.schedule.queue import FairQueue
from peagle.engine.schedule.request import FinishReason, PrefillChunk, Request
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batch: int
    prefill_chunk: int  # Prefill tokens of one plan.
    max_queue: int
    context: int  # Tokens of a request, its answer included.
    answer_slack: int = 0  # Positions beyond an answer's end that its last step may still read.
    context_slack: int = 0  # Those of them that may lie beyond the context: rows of a draft tree.
    reserve_pages: bool = False  # Allocate all pages at admission, so that nothing is preempted.

    def __post_init__(self) -> None:
        assert self.max_batch >= 1 and self.prefill_chunk >= 1 and self.context >= 2


@dataclass(slots=True)
class StepPlan:
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    def __init__(self, allocator: PageAllocator, config: SchedulerConfig) -> None:
        self.allocator = allocator
        self.config = config
        capacity = allocator.num_pages * allocator.page_size
        # A request alone must always fit into the pages.
        self.context = min(config.context, capacity - config.context_slack)
        self.waiting = FairQueue(config.max_queue)
        self.running: list[Request] = []  # In the order of admission.
        self.live: dict[str, Request] = {}  # Waiting or running requests, by id.
        self.num_added = 0
        self.preemptions = 0
        self.finished: Counter[FinishReason] = Counter()

    def max_length(self, request: Request) -> int:
        """The length at which the request ends with the reason "length"."""
        return min(self.context, len(request.prompt) + request.limits.max_tokens)

    def add(self, request: Request) -> None:
        """Queue a request whose prompt fits into the context."""
        assert request.status == "waiting" and not request.pages and not request.output
        assert 0 < len(request.prompt) < self.context
        if request.id in self.live:
            raise UserError(f"a request with `id` {request.id!r} is not finished yet: use another")
        self.waiting.push(request)
        self.live[request.id] = request
        self.num_added += 1

    def hash_pages(self, request: Request) -> list[bytes]:
        """The keys of the full pages whose next token is known. No page is hashed twice.

        Hashing a long prompt takes milliseconds: call this before the request is added, without
        the loop's lock.
        """
        keys = request.page_keys
        size = self.allocator.page_size
        full = (request.length - 1) // size if self.allocator.caching else 0
        for start in range(len(keys) * size, full * size, size):
            parent = keys[-1] if keys else root_key(request.cache_salt)
            keys.append(page_key(parent, request.token_range(start, start + size + 1)))
        return keys

    def plan(self, step_rows: int) -> StepPlan:
        """Plan the next step.

        `step_rows`: positions that a decode step may write, from `computed + ahead` on.
        """
        plan = StepPlan()
        budget = self.config.prefill_chunk
        for request in list(self.running):
            if request.status == "waiting" or (request.status == "prefill" and not budget):
                continue  # It was preempted just now, or its turn comes in the next plan.
            decodes = request.status == "decode"
            prefill_end = request.prefill_end
            end = request.computed if decodes else min(prefill_end, request.computed + budget)
            with_step = decodes or end == prefill_end
            if not self._ensure_pages(
                request, self._positions(request, end, step_rows, with_step), plan
            ):
                return plan  # The remaining pages are not for younger requests.
            if decodes:
                plan.decode.append(request)
            else:
                self._plan_chunk(plan, request, end)
                budget -= end - request.computed
        if not plan.preempted:
            self._admit(plan, budget, step_rows)
        return plan

    def mark_prefilled(self, chunk: PrefillChunk) -> None:
        """Record that the chunk is launched; later passes may read its pages."""
        request = chunk.request
        assert request.status == "prefill"
        assert request.computed == chunk.start < chunk.end <= request.prefill_end
        self._set_computed(request, chunk.end)
        if request.computed == request.prefill_end:
            request.status = "decode"

    def cancel_prefill(self, plan: StepPlan) -> list[Request]:
        """Return requests to the queue whose chunks were planned, but not launched.

        Their pages are withdrawn: requests of the same plan may share them, and start again too.
        """
        canceled = [
            chunk
            for chunk in plan.prefill
            if not chunk.request.finished and chunk.request.computed < chunk.end
        ]
        for chunk in canceled:
            first = chunk.start // self.allocator.page_size
            self.allocator.withdraw(chunk.request.pages[first:])
        for chunk in reversed(canceled):
            self._preempt(chunk.request)
        return [chunk.request for chunk in canceled]

    def append_first(self, request: Request, token: int) -> None:
        """Append the first token of the answer, which the last chunk of the prompt gave."""
        assert request.status == "decode"
        assert not request.output and request.computed == request.length
        request.output.append(token)
        # A page that ends with the prompt is published only now, with its next token known.
        self._set_computed(request, request.computed)

    def append(self, request: Request, tokens: list[int]) -> None:
        """Append the tokens of a decode step, cut at `max_length`; as many were computed."""
        assert request.status == "decode" and request.output and tokens
        request.output += tokens
        assert request.length <= self.max_length(request), "tokens beyond max_length must be cut"
        self._set_computed(request, request.computed + len(tokens))

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Release the pages of a request. Published ones stay shareable, except after an error.

        After an error the caller has overwritten the pages, or never runs another pass.
        """
        assert self.live.get(request.id) is request, f"request {request.id!r} is not live"
        if reason == "error":
            self.allocator.withdraw(request.pages)
        if request.status == "waiting":
            self.waiting.remove(request.id)
        else:
            # A pass of an aborted request may be in flight, or planned and not launched yet. After
            # another end, one may be in flight as well, but it only writes behind the answer.
            self._stop(request, verified=reason != "abort")
        del self.live[request.id]
        request.status = "finished"
        request.finish_reason = reason
        request.error = error
        self.finished[reason] += 1

    def _positions(self, request: Request, end: int, step_rows: int, with_step: bool) -> int:
        """Positions that need pages to compute up to `end`, and a decode step after it if asked."""
        config = self.config
        if not with_step and not config.reserve_pages:
            return end
        limit = min(
            self.max_length(request) + config.answer_slack, self.context + config.context_slack
        )
        return limit if config.reserve_pages else min(end + request.ahead + step_rows, limit)

    def _missing_pages(self, request: Request, positions: int) -> int:
        return max(0, self.allocator.pages_for(positions) - len(request.pages))

    def _ensure_pages(self, request: Request, positions: int, plan: StepPlan) -> bool:
        """Give the request pages for `positions`, preempting younger requests if necessary.

        Returns False if the pages are not available in this step.
        """
        missing = self._missing_pages(request, positions)
        if not missing:
            return True
        while (pages := self.allocator.allocate(missing)) is None:
            younger = self.running[self.running.index(request) + 1 :]
            victim = next((other for other in reversed(younger) if not other.in_flight), None)
            if victim is None:
                assert younger or request is not self.running[0], "a request alone always fits"
                return False
            self._preempt(victim)
            plan.preempted.append(victim)
        request.pages += pages
        return True

    def _preempt(self, request: Request) -> None:
        # The logits of the chunks before the last are never read back.
        self._stop(request, verified=request.status == "decode")
        request.computed = 0
        request.status = "waiting"
        self.waiting.push_front(request)
        self.preemptions += 1

    def _admit(self, plan: StepPlan, budget: int, step_rows: int) -> None:
        allocator = self.allocator
        while budget and len(self.running) < self.config.max_batch:
            request = self.waiting.peek()
            if request is None:
                break
            prefill_end = request.prefill_end
            # A page needs the token after it, so at least one token is left to compute.
            usable = (prefill_end - 1) // allocator.page_size
            shared = allocator.find_prefix(self.hash_pages(request)[:usable])
            positions = self._positions(request, prefill_end, step_rows, with_step=True)
            if allocator.pages_for(positions) - len(shared) > allocator.free_beside(shared):
                break
            allocator.share(shared)
            allocator.count_query(prefill_end, shared)
            request.pages = shared
            self.running.append(self.waiting.pop())
            request.computed = request.cached = len(request.pages) * allocator.page_size
            request.status = "prefill"
            end = min(prefill_end, request.computed + budget)
            positions = self._positions(request, end, step_rows, end == prefill_end)
            fits = self._ensure_pages(request, positions, plan)
            assert fits, "enough pages were free"
            self._plan_chunk(plan, request, end)
            budget -= end - request.computed

    def _plan_chunk(self, plan: StepPlan, request: Request, end: int) -> None:
        """Plan the prefill up to `end`; requests that are planned behind it may share its pages."""
        plan.prefill.append(PrefillChunk(request, request.computed, end))
        self._publish(request, end)

    def _set_computed(self, request: Request, computed: int) -> None:
        request.computed = computed
        self._publish(request, computed)

    def _publish(self, request: Request, end: int) -> None:
        """Publish the pages below position `end` that are full with their next token known.

        The KV of a page depends on the tokens of its key alone. If it is not finite, a request that
        shares the page would have computed the same, and fails by itself.
        """
        allocator = self.allocator
        full = min(end, request.length - 1) // allocator.page_size
        if full and allocator.caching and not allocator.is_sealed(request.pages[full - 1]):
            allocator.publish(self.hash_pages(request)[:full], request.pages)

    def _stop(self, request: Request, verified: bool) -> None:
        """`verified`: the contents of its pages are known to be finite, or overwritten."""
        self.running.remove(request)
        self.allocator.release(request.pages, verified)
        request.pages = []

    def check_integrity(self) -> None:
        """Assert that every request is in one place and has the pages for what is computed."""
        page_size = self.allocator.page_size
        self.allocator.check_integrity(request.pages for request in self.running)
        present = [*self.waiting, *self.running]
        assert len(present) == len(self.live), "a request is lost, or in two places"
        assert all(self.live[request.id] is request for request in present)
        assert self.num_added == len(self.live) + self.finished.total()
        assert len(self.running) <= self.config.max_batch
        for request in self.waiting:
            assert request.status == "waiting" and not request.pages
            assert request.computed == request.ahead == 0
        for request in self.running:
            prefilling = request.computed < request.prefill_end
            assert request.status == ("prefill" if prefilling else "decode")
            assert request.computed <= request.prefill_end and request.ahead >= 0
            computed = min(request.computed + request.ahead, self.max_length(request))
            assert computed <= len(request.pages) * page_size

"""The scheduler: who runs in the next step, and with which pages.

    add -> waiting -> (admitted) prefill -> decode -> finished
              ^----- preempted -----'---------'

The engine's loop: `plan`, launch what it says, `prefilled` for each chunk; when results are read back, `first` for a
prompt's first token, `advance` for a step's tokens, `finish`. It may plan again before it has read back: at launch it
adds to `request.ahead` what the step may emit at most, and takes it off when the result is there. It drops what comes
for a request that has finished meanwhile: those pages have a new owner, whose passes run later on the device.

* Running requests are served in the order of their admission. One that lacks pages takes them from the one admitted
  last; the oldest may have all pages there are, so it always gets on.
* A preempted request keeps its output and goes to the front of the queue. Its tokens are computed again (up to where:
  see request.py), save what the prefix table still has. One with results under way is never preempted: the plan says
  `stalled`, and the engine reads back first.
* A waiting request is admitted when everybody running has the pages of this step, and all that the new one has to
  compute, a decode step included, fits what is left. Nobody overtakes the first in the queue.
* No request gets pages beyond its `cap`. A row whose position has no page must not be written; what it says is cut.
"""

from collections import Counter
from dataclasses import dataclass, field

from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.schedule.queue import FairQueue
from peagle.engine.schedule.request import FinishReason, PrefillChunk, Request
from peagle.errors import UserError


@dataclass(slots=True)
class StepPlan:
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    stalled: bool = False  # pages are with requests under way: read back before the next plan


class Scheduler:
    def __init__(
        self,
        pages: PageAllocator,
        max_batch: int,
        chunk: int,
        max_queue: int,
        context: int,
        slack: int = 0,
        reserve: bool = False,
        spare: int = 0,
    ) -> None:
        """`chunk`: prefill tokens of one plan; `context`: the most tokens of a request, its answer included; `slack`:
        positions behind the end of an answer that its last step may still look at (drafts count as in any other step),
        `spare`: so many of them also behind the context (the rows of a tree lie side by side); `reserve`: a
        request has all the pages it may need from its admission on, so that nobody is ever preempted.
        """
        assert max_batch >= 1 and chunk >= 1 and context >= 2
        self.pages, self.max_batch, self.chunk, self.slack, self.reserve = (
            pages,
            max_batch,
            chunk,
            slack,
            reserve,
        )
        self.spare = spare
        self.context = min(
            context, pages.count * pages.size - spare
        )  # fits the pages, at least alone
        self.waiting = FairQueue(max_queue)
        self.running: list[Request] = []  # in the order of admission
        self.live: dict[str, Request] = {}  # waiting or running
        self.added = self.preemptions = 0
        self.done: Counter[FinishReason] = Counter()

    def cap(self, request: Request) -> int:
        """The most tokens the request may come to: at this length it ends with "length"."""
        return min(self.context, len(request.prompt) + request.limits.max_tokens)

    def add(self, request: Request) -> None:
        assert request.status == "waiting" and not request.pages and not request.output
        if not request.prompt:
            raise UserError("the prompt has no tokens: give at least one")
        if len(request.prompt) >= self.context:
            own = self.pages.count * self.pages.size - self.spare
            setting = "--kv-tokens" if self.context == own else "--context"
            raise UserError(
                f"the prompt has {len(request.prompt)} tokens, but with one token of the answer it must fit into"
                f" {self.context}: shorten it, or raise {setting}"
            )
        if request.id in self.live:
            raise UserError(f"a request with id {request.id!r} is not finished yet: use another id")
        self.waiting.push(request)
        self.live[request.id] = request
        self.added += 1

    def abort(self, id: str) -> Request | None:
        """None if no such request waits or runs (any more)."""
        request = self.live.get(id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def plan(self, rows: int) -> StepPlan:
        """The next step. `rows`: positions a decode step may write for a request, from computed + ahead on."""
        plan, budget = StepPlan(), self.chunk
        for request in list(self.running):
            if request.status == "waiting" or (request.status == "prefill" and not budget):
                continue  # preempted for an older one just now; or its turn comes in the next plan
            decodes = request.status == "decode"
            end = request.computed if decodes else min(request.goal, request.computed + budget)
            if not self._grow(
                request, self._reach(request, end, rows, decodes or end == request.goal), plan
            ):
                return plan  # what is left is not for younger ones
            if decodes:
                plan.decode.append(request)
            else:
                plan.prefill.append(PrefillChunk(request, request.computed, end))
                budget -= end - request.computed
        if not plan.preempted:
            self._admit(plan, budget, rows)
        return plan

    def prefilled(self, chunk: PrefillChunk) -> None:
        """The chunk has been launched. After a preemption its pages may be shared: the device works in order."""
        request = chunk.request
        assert (
            request.status == "prefill"
            and request.computed == chunk.start < chunk.end <= request.goal
        )
        self._compute(request, chunk.end)
        if request.computed == request.goal:
            request.status = "decode"

    def first(self, request: Request, token: int) -> None:
        """The prompt's last chunk gave the first token of the answer: known, but not consumed."""
        assert (
            request.status == "decode" and not request.output and request.computed == request.length
        )
        request.output.append(token)
        self._compute(
            request, request.computed
        )  # a page that ends with the prompt has waited for this token

    def advance(self, request: Request, tokens: list[int]) -> None:
        """A step emitted `tokens`, cut at the cap, and consumed as many positions."""
        assert request.status == "decode" and request.output and tokens
        request.output += tokens
        assert request.length <= self.cap(request), "what goes beyond the cap must be cut"
        self._compute(request, request.computed + len(tokens))

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Its full pages have been published all along; they are given back, and may be found again after no error."""
        assert self.live.get(request.id) is request, (
            f"request {request.id!r} is not here (any more)"
        )
        if reason == "error":
            self.pages.withdraw(request.pages)
        if request.status == "waiting":
            self.waiting.remove(request.id)
        else:
            self._stop(request)
        del self.live[request.id]
        request.status, request.finish_reason, request.error = "finished", reason, error
        self.done[reason] += 1

    def _reach(self, request: Request, end: int, rows: int, whole: bool) -> int:
        """Positions to have pages for when work goes up to `end`: at the goal, those of a decode step as well."""
        if not whole and not self.reserve:
            return end
        most = min(self.cap(request) + self.slack, self.context + self.spare)
        return most if self.reserve else min(end + request.ahead + rows, most)

    def _lacks(self, request: Request, positions: int) -> int:
        return max(0, self.pages.needed(positions) - len(request.pages))

    def _grow(self, request: Request, positions: int, plan: StepPlan) -> bool:
        """Does the request have pages for so many positions now? They are taken from younger ones if need be."""
        lacks = self._lacks(request, positions)
        if not lacks:
            return True
        while (pages := self.pages.allocate(lacks)) is None:
            younger = self.running[self.running.index(request) + 1 :]
            victim = next((other for other in reversed(younger) if not other.under_way), None)
            if victim is None:
                assert younger or request is not self.running[0], "a request alone always fits"
                plan.stalled = bool(younger)
                return False
            self._stop(victim)
            victim.computed, victim.status = 0, "waiting"
            self.waiting.push_front(victim)
            self.preemptions += 1
            plan.preempted.append(victim)
        request.pages += pages
        return True

    def _admit(self, plan: StepPlan, budget: int, rows: int) -> None:
        while budget and len(self.running) < self.max_batch and (request := self.waiting.peek()):
            tokens = request.tokens[: request.goal]
            request.pages = self.pages.match(tokens)
            if (
                self._lacks(request, self._reach(request, request.goal, rows, True))
                > self.pages.free
            ):
                self.pages.unmatch(tokens, request.pages)
                request.pages = []
                break
            self.running.append(self.waiting.pop())
            request.computed = request.cached = len(request.pages) * self.pages.size
            request.status, end = "prefill", min(request.goal, request.computed + budget)
            fits = self._grow(request, self._reach(request, end, rows, end == request.goal), plan)
            assert fits, "there was room for more than this"
            plan.prefill.append(PrefillChunk(request, request.computed, end))
            budget -= end - request.computed

    def _compute(self, request: Request, computed: int) -> None:
        """KV is there up to `computed`: pages that are full and whose next token is known are published.

        Not before the prompt's first token is there: a prompt whose logits are not numbers must fail alone.
        """
        request.computed = computed
        if not request.output:
            return
        if not self.pages.caching:
            return
        full = min(computed, request.length - 1) // self.pages.size
        if full and not self.pages.closed(request.pages[full - 1]):
            self.pages.publish(request.tokens[: full * self.pages.size + 1], request.pages)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.pages)
        request.pages = []

    def check_integrity(self) -> None:
        self.pages.check_integrity(request.pages for request in self.running)
        present = [*self.waiting, *self.running]
        assert len(present) == len(self.live), "a request is lost, or in two places"
        assert all(self.live[request.id] is request for request in present)
        assert self.added == len(self.live) + self.done.total()
        assert len(self.running) <= self.max_batch
        for request in self.waiting:
            assert (
                request.status == "waiting"
                and request.computed == request.ahead == len(request.pages) == 0
            )
        for request in self.running:
            assert request.status == ("prefill" if request.computed < request.goal else "decode")
            assert request.computed <= request.goal and request.ahead >= 0
            assert (
                min(request.computed + request.ahead, self.cap(request))
                <= len(request.pages) * self.pages.size
            )

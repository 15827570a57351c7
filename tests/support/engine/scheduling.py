"""Requests and small schedulers for tests of the scheduler."""

from typing import Any

from peagle.core import Sampling
from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.schedule.request import Request, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler, SchedulerConfig, StepPlan

K = 3
STEP_ROWS = K + 1


def make_request(
    id: str, prompt: list[int] | int = 4, max_tokens: int = 8, user: str = ""
) -> Request:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(id, ids, Sampling(), RequestLimits(max_tokens), user)


def make_scheduler(num_pages: int = 64, page_size: int = 4, **config: Any) -> Scheduler:
    defaults = {"max_batch": 4, "prefill_chunk": 64, "max_queue": 8, "context": 64}
    return Scheduler(PageAllocator(num_pages, page_size), SchedulerConfig(**defaults | config))


def planned_ids(plan: StepPlan) -> tuple[list[str], list[str]]:
    """The ids of the requests that prefill, and of those that decode."""
    return [chunk.request.id for chunk in plan.prefill], [request.id for request in plan.decode]


def run_plan(scheduler: Scheduler, plan: StepPlan, emitted: int = 1) -> None:
    """Run a step that is read back at once, with token 7 for every request."""
    for chunk in plan.prefill:
        scheduler.mark_prefilled(chunk)
        if chunk.next_id is None:
            scheduler.append_first(chunk.request, 7)
    for request in plan.decode:
        scheduler.append(request, [7] * emitted)
    scheduler.check_integrity()

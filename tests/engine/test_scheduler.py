"""The scheduler and its queue: who runs, with which pages, and who must wait."""

from typing import Any

import pytest

from peagle.core import Sampling
from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.schedule.queue import FairQueue, QueueFull
from peagle.engine.schedule.request import FinishReason, Request, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler, StepPlan
from peagle.errors import UserError

K = 3
ROWS = K + 1


def request(id: str, prompt: list[int] | int = 4, max_tokens: int = 8, user: str = "") -> Request:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(id, ids, Sampling(), RequestLimits(max_tokens), user)


def scheduler(
    pages: int = 64, size: int = 4, batch: int = 4, chunk: int = 64, context: int = 64
) -> Scheduler:
    return Scheduler(PageAllocator(pages, size), batch, chunk, max_queue=8, context=context)


def names(plan: StepPlan) -> tuple[list[str], list[str]]:
    return [chunk.request.id for chunk in plan.prefill], [request.id for request in plan.decode]


def follow(chosen: Scheduler, plan: StepPlan, emitted: int = 1) -> None:
    """One step, read back at once: token 7 for everybody."""
    for chunk in plan.prefill:
        chosen.prefilled(chunk)
        if chunk.next_id is None:
            chosen.first(chunk.request, 7)
    for each in plan.decode:
        chosen.advance(each, [7] * emitted)
    chosen.check_integrity()


# The queue.


def test_users_take_turns() -> None:
    queue = FairQueue(limit=8)
    for id in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(request(id, user=id[0]))
    queue.push_front(request("x"))
    assert [queue.pop().id for _ in range(len(queue))] == ["x", "a1", "b1", "c1", "a2", "c2", "a3"]
    assert queue.peek() is None


def test_the_queue_is_bounded_and_gives_up_requests() -> None:
    queue = FairQueue(limit=2)
    queue.push(request("a"))
    queue.push(request("b"))
    with pytest.raises(QueueFull, match="--max-queue"):
        queue.push(request("c"))
    queue.push_front(request("p"))  # was let in before
    assert [queue.remove(id) is not None for id in ("a", "p", "z")] == [True, True, False]
    assert [each.id for each in queue] == ["b"]


def test_one_request_behind_a_hundred_of_another_user_is_second() -> None:
    chosen = Scheduler(PageAllocator(256, 4), max_batch=2, chunk=64, max_queue=200, context=64)
    for i in range(100):
        chosen.add(request(f"a{i}", user="a"))
    chosen.add(request("b", user="b"))
    assert names(chosen.plan(ROWS)) == (["a0", "b"], [])


# What is refused.


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens must be in 0\.\.max_tokens \(4\); got 5"),
        ({"max_tokens": 4, "stop": ("a", "")}, "leave it out"),
        ({"max_tokens": 4, "stop_ids": frozenset([-1])}, "stop_ids"),
        ({"max_tokens": 4, "logprobs": 21}, r"0\.\.20"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        RequestLimits(**limits)


def test_what_can_never_run_is_refused() -> None:
    for prompt, chosen, fix in [
        (16, scheduler(context=16), "--context"),
        (16, scheduler(pages=4), "--kv-tokens"),
        (0, scheduler(), "no tokens"),
    ]:
        with pytest.raises(UserError, match=fix):
            chosen.add(request("a", prompt))
        assert chosen.added == 0
    chosen = scheduler(pages=4)
    chosen.add(request("a", 15, max_tokens=1000))
    with pytest.raises(UserError, match="another id"):
        chosen.add(request("a"))
    assert chosen.cap(chosen.live["a"]) == 16
    follow(chosen, chosen.plan(ROWS))
    assert chosen.live["a"].length == 16 and len(chosen.live["a"].pages) == 4


# Prefill and decode.


def test_a_plan_prefills_no_more_than_a_chunk() -> None:
    chosen = scheduler(chunk=10)
    for id, length in (("a", 4), ("b", 12), ("c", 4)):
        chosen.add(request(id, [ord(id)] * length))
    chunks = []
    for _ in range(3):
        plan = chosen.plan(ROWS)
        chunks.append(
            [(chunk.request.id, chunk.start, chunk.end, chunk.next_id) for chunk in plan.prefill]
        )
        follow(chosen, plan)
    assert chunks == [
        [("a", 0, 4, None), ("b", 0, 6, 98)],
        [("b", 6, 12, None), ("c", 0, 4, None)],
        [],
    ]
    assert [each.status for each in chosen.running] == ["decode"] * 3
    assert [each.output for each in chosen.running] == [[7, 7, 7], [7, 7], [7, 7]]


def test_a_decode_step_has_pages_for_its_rows_and_what_is_ahead() -> None:
    chosen = scheduler(size=2, context=20)
    chosen.add(request("a", 4, max_tokens=100))
    follow(chosen, chosen.plan(ROWS))
    a = chosen.live["a"]
    for ahead, pages in ((0, 4), (4, 6), (8, 8), (12, 10), (16, 10)):
        a.ahead = ahead
        assert chosen.plan(ROWS).decode == [a]
        assert len(a.pages) == pages


def test_pages_are_published_when_the_next_token_is_known() -> None:
    chosen = scheduler(size=2)
    chosen.add(request("a", [1, 2, 3, 4]))
    plan = chosen.plan(ROWS)
    chosen.prefilled(plan.prefill[0])
    a = chosen.running[0]
    assert len(chosen.pages.table) == 0 and a.under_way
    chosen.first(a, 5)
    assert len(chosen.pages.table) == 2 and not a.under_way
    chosen.advance(a, [6])
    assert len(chosen.pages.table) == 2
    chosen.advance(a, [7, 8, 9])
    assert len(chosen.pages.table) == 4 and a.computed == 8
    chosen.finish(a, "stop")
    chosen.add(request("b", [1, 2, 3, 4, 5, 6, 9]))
    b = chosen.plan(ROWS).prefill[0]
    assert (b.start, b.end, b.request.cached) == (4, 7, 4)  # 5 6 was followed by 7


@pytest.mark.parametrize(("reason", "cached"), [("stop", 8), ("error", 0)])
def test_what_an_error_left_behind_is_not_shared(reason: FinishReason, cached: int) -> None:
    chosen = scheduler()
    chosen.add(request("a", 9))
    follow(chosen, chosen.plan(ROWS))
    chosen.finish(chosen.live["a"], reason)
    chosen.check_integrity()
    chosen.add(request("b", 9))
    assert chosen.plan(ROWS).prefill[0].request.cached == cached


# When pages run out.


def crowded() -> Scheduler:
    """Two requests that decode, and no page left: 10 pages of 2."""
    chosen = scheduler(pages=10, size=2)
    for id in ("a", "b"):
        chosen.add(request(id, [ord(id)] * 6, max_tokens=14))
    follow(chosen, chosen.plan(ROWS))
    assert chosen.pages.free == 0 and [len(each.pages) for each in chosen.running] == [5, 5]
    return chosen


def test_the_one_admitted_last_is_preempted_and_computed_again() -> None:
    chosen = crowded()
    follow(chosen, chosen.plan(ROWS), emitted=4)
    b = chosen.live["b"]
    chosen.add(request("c", 2))
    plan = chosen.plan(ROWS)
    assert names(plan) == ([], ["a"]) and plan.preempted == [b] and chosen.preemptions == 1
    assert (b.status, b.computed, len(b.output), chosen.waiting.peek()) == ("waiting", 0, 5, b)
    follow(chosen, plan)
    chosen.abort("a")
    chunk = chosen.plan(ROWS).prefill[0]
    assert (chunk.request, chunk.start, chunk.end, chunk.next_id) == (
        b,
        6,
        10,
        7,
    )  # a took two of its pages
    chosen.prefilled(chunk)
    assert (b.status, b.computed, b.length, b.under_way) == ("decode", 10, 11, False)
    chosen.check_integrity()


def test_the_youngest_goes_first_and_the_order_stays() -> None:
    chosen = scheduler(pages=12, size=2)
    for id in ("a", "b", "c"):
        chosen.add(request(id, [ord(id)] * 2, max_tokens=22))
    plans: list[StepPlan] = []
    while not plans or len(chosen.running) > 1:
        plans.append(chosen.plan(ROWS))
        follow(chosen, plans[-1], emitted=2)
    assert [each.id for plan in plans for each in plan.preempted] == ["c", "b"]
    assert [each.id for each in chosen.waiting.front] == ["b", "c"]


def test_a_prompt_is_not_begun_that_does_not_fit() -> None:
    chosen = scheduler(pages=10, size=2, chunk=6)
    for id in ("a", "b"):
        chosen.add(request(id, [ord(id)] * 10, max_tokens=4))
    for _ in range(
        3
    ):  # after two chunks of a, three pages are left: enough for the first chunk of b
        plan = chosen.plan(ROWS)
        assert all(chunk.request.id == "a" for chunk in plan.prefill)
        follow(chosen, plan)
    assert chosen.pages.free == 3 and (chosen.pages.asked, chosen.pages.found) == (
        10,
        0,
    )  # b's tries do not count
    chosen.finish(chosen.live["a"], "stop")
    assert names(chosen.plan(ROWS)) == (["b"], []) and chosen.preemptions == 0


def test_nobody_with_results_under_way_is_preempted() -> None:
    chosen = crowded()
    a, b = chosen.running
    assert chosen.plan(ROWS).decode == [a, b]
    a.ahead = b.ahead = ROWS  # launched, and planned again before it is read back
    plan = chosen.plan(ROWS)
    assert plan == StepPlan(stalled=True)
    a.ahead = b.ahead = 0
    chosen.advance(a, [7])
    chosen.advance(b, [7, 7])
    plan = chosen.plan(ROWS)
    assert names(plan) == ([], ["a"]) and plan.preempted == [b] and not plan.stalled
    chosen.check_integrity()


def test_abort_anywhere() -> None:
    chosen = scheduler(batch=1)
    for id in ("a", "b"):
        chosen.add(request(id))
    follow(chosen, chosen.plan(ROWS))
    for id, status in (("b", "waiting"), ("a", "decode")):
        assert chosen.live[id].status == status
        gone = chosen.abort(id)
        assert gone is not None and (gone.status, gone.finish_reason, gone.pages) == (
            "finished",
            "abort",
            [],
        )
        chosen.check_integrity()
    assert chosen.abort("a") is None and chosen.done["abort"] == 2

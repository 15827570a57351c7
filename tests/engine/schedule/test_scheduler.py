"""The scheduler and its queue: which requests run with which pages, and which ones wait."""

import random
from typing import Any

import pytest

from peagle.engine.kv.page_keys import page_key
from peagle.engine.schedule import scheduler as scheduler_module
from peagle.engine.schedule.prompt_rules import PromptRules
from peagle.engine.schedule.queue import FairQueue, QueueFull
from peagle.engine.schedule.request import FinishReason, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler, StepPlan
from peagle.errors import UserError
from tests.support.engine.scheduling import (
    STEP_ROWS,
    make_request,
    make_scheduler,
    planned_ids,
    run_plan,
)

# The queue.


def test_users_take_turns() -> None:
    queue = FairQueue(limit=8)
    for id in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(make_request(id, user=id[0]))
    queue.push_front(make_request("x"))
    assert [queue.pop().id for _ in range(len(queue))] == ["x", "a1", "b1", "c1", "a2", "c2", "a3"]
    assert queue.peek() is None


def test_the_queue_is_bounded_and_requests_can_be_removed() -> None:
    queue = FairQueue(limit=2)
    queue.push(make_request("a"))
    queue.push(make_request("b"))
    with pytest.raises(QueueFull, match="`max_queue`"):
        queue.push(make_request("c"))
    queue.push_front(make_request("p"))  # It was admitted before.
    assert [queue.remove(id) is not None for id in ("a", "p", "z")] == [True, True, False]
    assert [request.id for request in queue] == ["b"]


def test_a_request_after_a_hundred_of_another_user_is_second() -> None:
    scheduler = make_scheduler(256, max_batch=2, max_queue=200)
    for i in range(100):
        scheduler.add(make_request(f"a{i}", user="a"))
    scheduler.add(make_request("b", user="b"))
    assert planned_ids(scheduler.plan(STEP_ROWS)) == (["a0", "b"], [])


# Requests that are refused.


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ({"max_tokens": 0}, "`max_tokens` must be 1 or more"),
        (
            {"max_tokens": 4, "min_tokens": 5},
            r"`min_tokens` must be in 0\.\.max_tokens \(4\); got 5",
        ),
        ({"max_tokens": 4, "stop": ("a", "")}, "leave it out"),
        ({"max_tokens": 4, "stop_ids": frozenset([-1])}, "stop_ids"),
        ({"max_tokens": 4, "logprobs": 21}, r"0\.\.20"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        RequestLimits(**limits)


def test_prompts_that_can_never_run_are_refused() -> None:
    for prompt, scheduler, setting, fix in [
        (16, make_scheduler(context=16), "context", "`context`"),
        (16, make_scheduler(num_pages=4), "kv_tokens", "`kv_tokens`"),
        (0, make_scheduler(), None, "empty"),
    ]:
        with pytest.raises(UserError, match=fix):
            PromptRules(scheduler.context, 96, setting).check(range(prompt))
        with pytest.raises(AssertionError):
            scheduler.add(make_request("a", prompt))
        assert scheduler.num_added == 0
    scheduler = make_scheduler(num_pages=4)
    PromptRules(scheduler.context, 96).check(range(15))
    scheduler.add(make_request("a", 15, max_tokens=1000))
    with pytest.raises(UserError, match="'a' is not finished yet: use another"):
        scheduler.add(make_request("a"))
    request = scheduler.live["a"]
    assert scheduler.max_length(request) == 16
    run_plan(scheduler, scheduler.plan(STEP_ROWS))
    assert request.length == 16 and len(request.pages) == 4


# Prefill and decode.


def test_a_plan_prefills_no_more_than_a_chunk() -> None:
    scheduler = make_scheduler(prefill_chunk=10)
    for id, length in (("a", 4), ("b", 12), ("c", 4)):
        scheduler.add(make_request(id, [ord(id)] * length))
    chunks = []
    for _ in range(3):
        plan = scheduler.plan(STEP_ROWS)
        chunks.append(
            [(chunk.request.id, chunk.start, chunk.end, chunk.next_id) for chunk in plan.prefill]
        )
        run_plan(scheduler, plan)
    assert chunks == [
        [("a", 0, 4, None), ("b", 0, 6, 98)],
        [("b", 6, 12, None), ("c", 0, 4, None)],
        [],
    ]
    assert [request.status for request in scheduler.running] == ["decode"] * 3
    assert [request.output for request in scheduler.running] == [[7, 7, 7], [7, 7], [7, 7]]


def test_a_decode_step_has_pages_for_its_rows_and_for_steps_in_flight() -> None:
    scheduler = make_scheduler(page_size=2, context=20)
    scheduler.add(make_request("a", 4, max_tokens=100))
    run_plan(scheduler, scheduler.plan(STEP_ROWS))
    a = scheduler.live["a"]
    for ahead, pages in ((0, 4), (4, 6), (8, 8), (12, 10), (16, 10)):
        a.ahead = ahead
        assert scheduler.plan(STEP_ROWS).decode == [a]
        assert len(a.pages) == pages


def test_pages_are_published_when_the_next_token_is_known() -> None:
    scheduler = make_scheduler(page_size=2)
    scheduler.add(make_request("a", [1, 2, 3, 4]))
    plan = scheduler.plan(STEP_ROWS)
    scheduler.mark_prefilled(plan.prefill[0])
    a = scheduler.running[0]
    prefix_table = scheduler.allocator.prefix_table
    assert len(prefix_table) == 1 and a.in_flight  # The token after 3 4 is not known yet.
    scheduler.append_first(a, 5)
    assert len(prefix_table) == 2 and not a.in_flight
    scheduler.append(a, [6])
    assert len(prefix_table) == 2
    scheduler.append(a, [7, 8, 9])
    assert len(prefix_table) == 4 and a.computed == 8
    scheduler.finish(a, "stop")
    scheduler.add(make_request("b", [1, 2, 3, 4, 5, 6, 9]))
    b = scheduler.plan(STEP_ROWS).prefill[0]
    assert (b.start, b.end, b.request.cached) == (4, 7, 4)  # 5 6 was followed by 7.


def test_choices_of_a_prompt_are_prefilled_once() -> None:
    """Choices that are admitted together share the pages of the first before it is computed."""
    scheduler = make_scheduler(prefill_chunk=30)
    for id in ("a", "b", "c"):
        scheduler.add(make_request(id, 18))
    chunks = scheduler.plan(STEP_ROWS).prefill
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 18), (16, 18), (16, 18)]
    assert chunks[1].request.pages[:4] == chunks[0].request.pages[:4]
    assert (scheduler.allocator.hit_tokens, scheduler.allocator.queried_tokens) == (32, 54)
    scheduler.check_integrity()


def test_choices_of_a_chunked_prompt_are_prefilled_once() -> None:
    scheduler = make_scheduler(prefill_chunk=10)
    for id in ("a", "b", "c"):
        scheduler.add(make_request(id, 26))
    chunks = []
    for _ in range(4):
        plan = scheduler.plan(STEP_ROWS)
        chunks.append([(chunk.request.id, chunk.start, chunk.end) for chunk in plan.prefill])
        run_plan(scheduler, plan)
    assert chunks == [
        [("a", 0, 10)],
        [("a", 10, 20)],
        [("a", 20, 26), ("b", 24, 26), ("c", 24, 26)],
        [],
    ]


def test_requests_share_pages_of_their_own_salt_only() -> None:
    scheduler = make_scheduler()
    salts = {"a": "", "b": "key", "c": "", "d": "key"}
    for id, salt in salts.items():
        request = make_request(id, 9)
        request.cache_salt = salt
        scheduler.add(request)
    cached = {chunk.request.id: chunk.start for chunk in scheduler.plan(STEP_ROWS).prefill}
    assert cached == {"a": 0, "b": 0, "c": 8, "d": 8}


def test_a_waiting_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated plans do not hash a prompt again, and pages that fill later are hashed once."""
    hashed: list[list[int]] = []

    def count(parent: bytes, tokens: list[int]) -> bytes:
        hashed.append(tokens)
        return page_key(parent, tokens)

    monkeypatch.setattr(scheduler_module, "page_key", count)
    scheduler = make_scheduler(8)
    scheduler.add(make_request("a", [9] * 13, max_tokens=14))
    scheduler.add(make_request("b", [8] * 17, max_tokens=8))
    for steps in range(1, 7):
        run_plan(scheduler, scheduler.plan(STEP_ROWS))
        assert scheduler.live["b"].status == "waiting"
        assert len(hashed) == 3 + 4 + (steps > 3), steps
    assert hashed[-1] == [9, 7, 7, 7, 7]


@pytest.mark.parametrize(("reason", "cached"), [("stop", 8), ("error", 0)])
def test_pages_of_a_failed_request_are_not_shared(reason: FinishReason, cached: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9))
    run_plan(scheduler, scheduler.plan(STEP_ROWS))
    scheduler.finish(scheduler.live["a"], reason)
    scheduler.check_integrity()
    scheduler.add(make_request("b", 9))
    assert scheduler.plan(STEP_ROWS).prefill[0].request.cached == cached


# When pages run out.


def crowded() -> Scheduler:
    """A scheduler with two decoding requests and no free page; 10 pages of 2 tokens."""
    scheduler = make_scheduler(10, 2)
    for id in ("a", "b"):
        scheduler.add(make_request(id, [ord(id)] * 6, max_tokens=14))
    run_plan(scheduler, scheduler.plan(STEP_ROWS))
    assert scheduler.allocator.num_free == 0
    assert [len(request.pages) for request in scheduler.running] == [5, 5]
    return scheduler


def test_the_last_admitted_request_is_preempted_and_recomputed() -> None:
    scheduler = crowded()
    run_plan(scheduler, scheduler.plan(STEP_ROWS), emitted=4)
    b = scheduler.live["b"]
    scheduler.add(make_request("c", 2))
    plan = scheduler.plan(STEP_ROWS)
    assert planned_ids(plan) == ([], ["a"])
    assert plan.preempted == [b] and scheduler.preemptions == 1
    assert (b.status, b.computed, len(b.output)) == ("waiting", 0, 5)
    assert scheduler.waiting.peek() is b
    run_plan(scheduler, plan)
    scheduler.finish(scheduler.live["a"], "abort")
    chunk = scheduler.plan(STEP_ROWS).prefill[0]
    # Two of its pages were given to a.
    assert (chunk.request, chunk.start, chunk.end, chunk.next_id) == (b, 6, 10, 7)
    scheduler.mark_prefilled(chunk)
    assert (b.status, b.computed, b.length, b.in_flight) == ("decode", 10, 11, False)
    scheduler.check_integrity()


def test_the_newest_is_preempted_first_and_order_is_kept() -> None:
    scheduler = make_scheduler(12, 2)
    for id in ("a", "b", "c"):
        scheduler.add(make_request(id, [ord(id)] * 2, max_tokens=22))
    plans: list[StepPlan] = []
    while not plans or len(scheduler.running) > 1:
        plans.append(scheduler.plan(STEP_ROWS))
        run_plan(scheduler, plans[-1], emitted=2)
    assert [request.id for plan in plans for request in plan.preempted] == ["c", "b"]
    assert [request.id for request in scheduler.waiting.front] == ["b", "c"]


def test_a_prompt_that_does_not_fit_is_not_started() -> None:
    scheduler = make_scheduler(10, 2, prefill_chunk=6)
    allocator = scheduler.allocator
    for id in ("a", "b"):
        scheduler.add(make_request(id, [ord(id)] * 10, max_tokens=4))
    # After two chunks of a, three pages are left: enough for the first chunk of b.
    for _ in range(3):
        plan = scheduler.plan(STEP_ROWS)
        assert all(chunk.request.id == "a" for chunk in plan.prefill)
        run_plan(scheduler, plan)
    assert allocator.num_free == 3
    # The attempts to admit b do not count.
    assert (allocator.queried_tokens, allocator.hit_tokens) == (10, 0)
    scheduler.finish(scheduler.live["a"], "stop")
    assert planned_ids(scheduler.plan(STEP_ROWS)) == (["b"], []) and scheduler.preemptions == 0


def test_a_request_in_flight_is_not_preempted() -> None:
    scheduler = crowded()
    a, b = scheduler.running
    assert scheduler.plan(STEP_ROWS).decode == [a, b]
    a.ahead = b.ahead = STEP_ROWS  # Launched, and planned again before it is read back.
    plan = scheduler.plan(STEP_ROWS)
    assert plan == StepPlan() and scheduler.running == [a, b]
    a.ahead = b.ahead = 0
    scheduler.append(a, [7])
    scheduler.append(b, [7, 7])
    plan = scheduler.plan(STEP_ROWS)
    assert planned_ids(plan) == ([], ["a"]) and plan.preempted == [b]
    scheduler.check_integrity()


def test_requests_are_aborted_in_any_state() -> None:
    scheduler = make_scheduler(max_batch=1)
    for id in ("a", "b"):
        scheduler.add(make_request(id))
    run_plan(scheduler, scheduler.plan(STEP_ROWS))
    for id, status in (("b", "waiting"), ("a", "decode")):
        request = scheduler.live[id]
        assert request.status == status
        scheduler.finish(request, "abort")
        assert (request.status, request.finish_reason) == ("finished", "abort")
        assert request.pages == []
        scheduler.check_integrity()
    assert "a" not in scheduler.live and scheduler.finished["abort"] == 2


@pytest.mark.parametrize("order", ["together", "shuffled"])
def test_eight_conversations_keep_their_prefixes(order: str) -> None:
    """With pages for 1.5 times their tokens, every turn reuses all full pages."""
    rng = random.Random(0)
    turns, answer_tokens, result_tokens = 10, 6, 9
    texts = [[1000 * c + i for i in range(40 + 3 * c)] for c in range(8)]
    total = sum(map(len, texts)) + 8 * turns * (answer_tokens + result_tokens)
    scheduler = make_scheduler(
        total * 3 // 2 // 4, context=400, max_batch=8, prefill_chunk=128, max_queue=80
    )
    reusable = [0] * 8
    turn_order = [c for _ in range(turns) for c in range(8)]
    if order == "shuffled":
        rng.shuffle(turn_order)
    size = 8 if order == "together" else 1
    for first in range(0, len(turn_order), size):
        requests = {
            c: make_request(f"{first} {c}", texts[c], answer_tokens)
            for c in turn_order[first : first + size]
        }
        for request in requests.values():
            scheduler.add(request)
        while scheduler.live:
            run_plan(scheduler, scheduler.plan(STEP_ROWS))
            for request in list(scheduler.running):
                if request.length == scheduler.max_length(request):
                    scheduler.finish(request, "length")
        for c, request in requests.items():
            assert request.cached == reusable[c] // 4 * 4
            texts[c] = request.tokens
            reusable[c] = len(texts[c]) - 1  # The newest token is not in the pages.
            texts[c] += [1000 * c + rng.randrange(900) for _ in range(result_tokens)]
    assert not scheduler.preemptions

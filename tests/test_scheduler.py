"""The scheduler, with an engine that only pretends: a page remembers which tokens it was computed from."""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from peagle.core import Sampling
from peagle.engine.pages import Pages
from peagle.engine.queue import FairQueue, QueueFull
from peagle.engine.request import Limits, Reason, Request
from peagle.engine.scheduler import Plan, Scheduler
from peagle.errors import UserError

K = 3
ROWS = K + 1


def request(id: str, prompt: list[int] | int = 4, max_tokens: int = 8, user: str = "") -> Request:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(id, ids, Sampling(), Limits(max_tokens), user)


def scheduler(pages: int = 64, size: int = 4, batch: int = 4, chunk: int = 64, context: int = 64) -> Scheduler:
    return Scheduler(Pages(pages, size), batch, chunk, max_queue=8, context=context)


def names(plan: Plan) -> tuple[list[str], list[str]]:
    return [chunk.request.id for chunk in plan.prefill], [request.id for request in plan.decode]


def follow(chosen: Scheduler, plan: Plan, emitted: int = 1) -> None:
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
    chosen = Scheduler(Pages(256, 4), max_batch=2, chunk=64, max_queue=200, context=64)
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
        Limits(**limits)


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
        chunks.append([(chunk.request.id, chunk.start, chunk.end, chunk.next_id) for chunk in plan.prefill])
        follow(chosen, plan)
    assert chunks == [[("a", 0, 4, None), ("b", 0, 6, 98)], [("b", 6, 12, None), ("c", 0, 4, None)], []]
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
def test_what_an_error_left_behind_is_not_shared(reason: Reason, cached: int) -> None:
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
    assert (chunk.request, chunk.start, chunk.end, chunk.next_id) == (b, 6, 10, 7)  # a took two of its pages
    chosen.prefilled(chunk)
    assert (b.status, b.computed, b.length, b.under_way) == ("decode", 10, 11, False)
    chosen.check_integrity()


def test_the_youngest_goes_first_and_the_order_stays() -> None:
    chosen = scheduler(pages=12, size=2)
    for id in ("a", "b", "c"):
        chosen.add(request(id, [ord(id)] * 2, max_tokens=22))
    plans: list[Plan] = []
    while not plans or len(chosen.running) > 1:
        plans.append(chosen.plan(ROWS))
        follow(chosen, plans[-1], emitted=2)
    assert [each.id for plan in plans for each in plan.preempted] == ["c", "b"]
    assert [each.id for each in chosen.waiting.front] == ["b", "c"]


def test_a_prompt_is_not_begun_that_does_not_fit() -> None:
    chosen = scheduler(pages=10, size=2, chunk=6)
    for id in ("a", "b"):
        chosen.add(request(id, [ord(id)] * 10, max_tokens=4))
    for _ in range(3):  # after two chunks of a, three pages are left: enough for the first chunk of b
        plan = chosen.plan(ROWS)
        assert all(chunk.request.id == "a" for chunk in plan.prefill)
        follow(chosen, plan)
    assert chosen.pages.free == 3 and (chosen.pages.asked, chosen.pages.found) == (10, 0)  # b's tries do not count
    chosen.finish(chosen.live["a"], "stop")
    assert names(chosen.plan(ROWS)) == (["b"], []) and chosen.preemptions == 0


def test_nobody_with_results_under_way_is_preempted() -> None:
    chosen = crowded()
    a, b = chosen.running
    assert chosen.plan(ROWS).decode == [a, b]
    a.ahead = b.ahead = ROWS  # launched, and planned again before it is read back
    plan = chosen.plan(ROWS)
    assert plan == Plan(stalled=True)
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
        assert gone is not None and (gone.status, gone.finish_reason, gone.pages) == ("finished", "abort", [])
        chosen.check_integrity()
    assert chosen.abort("a") is None and chosen.done["abort"] == 2


# The pretended engine.


def says(tokens: tuple[int, ...]) -> int:
    """The target: the token after `tokens`."""
    return (sum(tokens) * 5 + len(tokens) // 3) % 3


class Engine:
    """Steps run on the device when launched, and are read back later; a step's draft may be right or wrong.

    The KV of position j is right if it was computed from tokens 0..j, the drafter's from tokens 0..j + 1.
    """

    def __init__(self, chosen: Scheduler) -> None:
        self.scheduler = chosen
        self.target: dict[tuple[int, int], tuple[int, ...]] = {}  # by page and offset
        self.drafter: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}  # all that the device knows of a request
        self.unread: deque[list[tuple[Request, list[int]]]] = deque()

    def write(self, kv: dict[tuple[int, int], tuple[int, ...]], to: Request, j: int, value: tuple[int, ...]) -> None:
        size = self.scheduler.pages.size
        if j // size < len(to.pages):
            kv[to.pages[j // size], j % size] = value

    def verify(self, of: Request, end: int) -> None:
        """Everything that a row at position `end` would see is right."""
        tokens, size = self.tokens[of.id], self.scheduler.pages.size
        for j in range(min(end, self.scheduler.cap(of))):
            slot = of.pages[j // size], j % size
            assert self.target[slot] == tokens[: j + 1]
            assert self.drafter[slot] == tokens[: j + 2]

    def launch(self, accepted: list[int]) -> Plan:
        plan = self.scheduler.plan(ROWS)
        assert sum(chunk.end - chunk.start for chunk in plan.prefill) <= self.scheduler.chunk
        assert not {chunk.request for chunk in plan.prefill} & set(plan.preempted)
        assert not plan.stalled or any(self.unread), "nothing to read back"
        results = [self.prefill(chunk) for chunk in plan.prefill]
        results += [self.decode(each, right) for each, right in zip(plan.decode, accepted, strict=False)]
        self.unread.append([result for result in results if result[1]])
        return plan

    def prefill(self, chunk: Any) -> tuple[Request, list[int]]:
        of = chunk.request
        assert tuple(chunk.ids) == tuple(of.tokens[chunk.start : chunk.end]) and chunk.ids
        self.tokens[of.id] = known = tuple(of.tokens)
        self.verify(of, chunk.start)
        said = [] if chunk.next_id is not None else [says(known)]
        self.tokens[of.id] = known = known + tuple(said)
        for j in range(chunk.start, chunk.end):
            self.write(self.target, of, j, known[: j + 1])
            self.write(self.drafter, of, j, known[: j + 2])
        self.scheduler.prefilled(chunk)
        return of, said

    def decode(self, of: Request, accepted: int) -> tuple[Request, list[int]]:
        known = self.tokens[of.id]
        newest = len(known) - 1
        assert min(newest + ROWS, self.scheduler.cap(of)) <= len(of.pages) * self.scheduler.pages.size
        self.verify(of, newest)
        for _ in range(accepted + 1):
            known += (says(known),)
        for i in range(ROWS):  # what was rejected is written as well, and overwritten later
            self.write(self.target, of, newest + i, known[: newest + i + 1] if i <= accepted else ())
        for i in range(accepted + K):  # so are the drafter's K - 1 mask rows
            self.write(self.drafter, of, newest + i, known[: newest + i + 2] if i <= accepted else ())
        self.tokens[of.id] = known
        of.ahead += ROWS
        return of, list(known[newest + 1 :])

    def read(self) -> None:
        for of, tokens in self.unread.popleft():
            if of.finished:
                continue
            if of.output:
                of.ahead -= ROWS
                self.scheduler.advance(of, tokens[: self.scheduler.cap(of) - of.length])
            else:
                self.scheduler.first(of, tokens[0])
            if of.length == self.scheduler.cap(of):
                self.scheduler.finish(of, "length")
            elif of.limits.stop_ids & set(tokens):
                self.scheduler.finish(of, "stop")

    def drain(self) -> None:
        """Nobody is forgotten: every step gets the oldest on by a token at least."""
        for steps in range(1000):
            if not self.scheduler.live:
                break
            self.launch([steps % ROWS] * self.scheduler.max_batch)
            while self.unread:
                self.read()
            self.scheduler.check_integrity()
        assert not self.scheduler.live and self.scheduler.pages.free == self.scheduler.pages.count


def right(each: Request) -> bool:
    """Finished, and every token is what the target says after those before it."""
    starts = range(len(each.prompt), each.length)
    return each.finished and all(each.tokens[end] == says(tuple(each.tokens[:end])) for end in starts)


COMMON = [0, 1, 2, 1, 0, 0, 1, 2, 2, 0, 1, 0, 2, 1]  # many prompts begin like this one
PROMPTS = st.one_of(
    st.integers(1, len(COMMON)).map(lambda length: COMMON[:length]),
    st.lists(st.integers(0, 2), min_size=1, max_size=len(COMMON)),
)
BATCH, QUEUE = 4, 6
ACCEPTED = st.lists(st.integers(0, K), min_size=BATCH, max_size=BATCH)


class Machine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(6, 14),
        size=st.integers(1, 4),
        chunk=st.integers(1, 16),
        batch=st.integers(1, BATCH),
        slack=st.integers(0, K),
    )
    def start(self, pages: int, size: int, chunk: int, batch: int, slack: int) -> None:
        self.scheduler = Scheduler(Pages(pages, size), batch, chunk, QUEUE, context=24, slack=slack)
        self.engine = Engine(self.scheduler)
        self.requests: list[Request] = []

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 20), user=st.sampled_from("abc"), stops=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, user: str, stops: bool) -> None:
        limits = Limits(max_tokens, stop_ids=frozenset([2] if stops else []))
        new = Request(str(len(self.requests)), prompt, Sampling(), limits, user)
        try:
            self.scheduler.add(new)
        except QueueFull:
            assert len(self.scheduler.waiting) >= QUEUE
        except UserError:
            assert len(prompt) >= self.scheduler.context
        else:
            self.requests.append(new)

    @precondition(lambda self: len(self.engine.unread) < 3)
    @rule(accepted=ACCEPTED)
    def launch(self, accepted: list[int]) -> None:
        self.engine.launch(accepted)

    @precondition(lambda self: self.engine.unread)
    @rule()
    def read(self) -> None:
        self.engine.read()

    @rule(accepted=ACCEPTED)
    def step(self, accepted: list[int]) -> None:
        """As a pipelined engine does: launch, then read what was launched before."""
        self.engine.launch(accepted)
        while len(self.engine.unread) > 1:
            self.engine.read()

    @rule(number=st.integers(0, 60))
    def abort(self, number: int) -> None:
        alive = str(number) in self.scheduler.live
        assert (self.scheduler.abort(str(number)) is not None) == alive

    @precondition(lambda self: self.scheduler.running)
    @rule(place=st.integers(0, 20 * BATCH))
    def fail(self, place: int) -> None:
        if place < len(self.scheduler.running):
            self.scheduler.finish(self.scheduler.running[place], "error", "not a number")

    @invariant()
    def whole(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            assert all(right(each) for each in self.requests)


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
TestMachine = Machine.TestCase


@pytest.mark.parametrize("depth", [0, 1, 2])  # results that are not read back when the next step is launched
def test_ten_thousand_operations(depth: int) -> None:
    chance, requests = random.Random(depth), list[Request]()
    chosen = Scheduler(Pages(14, 3), BATCH, 8, QUEUE, context=30)
    engine = Engine(chosen)
    for _ in range(3500):
        prompt = [*COMMON[: chance.randrange(9)], chance.randrange(3)]
        new = Request(str(len(requests)), prompt, Sampling(), Limits(chance.randint(1, 20)), chance.choice("abc"))
        if len(chosen.waiting) < QUEUE:
            chosen.add(new)
            requests.append(new)
        if chance.random() < 0.02:
            chosen.abort(chance.choice(requests[-8:]).id)
        chosen.check_integrity()
        engine.launch(chance.choices(range(ROWS), k=BATCH))
        chosen.check_integrity()
        while len(engine.unread) > depth:
            engine.read()
            chosen.check_integrity()
    engine.drain()
    assert all(right(each) for each in requests) and len(requests) > 500
    assert chosen.preemptions > 100 and chosen.pages.found > 1000

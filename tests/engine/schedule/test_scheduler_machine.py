"""The scheduler under a simulated engine, whose pages record the tokens they were computed from."""

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
from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.schedule.queue import QueueFull
from peagle.engine.schedule.request import Request, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler, SchedulerConfig, StepPlan
from tests.support.engine.scheduling import STEP_ROWS, K


def says(tokens: tuple[int, ...]) -> int:
    """The target: the token after `tokens`."""
    return (sum(tokens) * 5 + len(tokens) // 3) % 3


KV = dict[tuple[int, int], tuple[str | int, ...]]  # salt and tokens, by page and offset


class Engine:
    """Steps run on the device when launched, and are read back later; drafts may be right or wrong.

    The KV of position j is right if it was computed from tokens 0..j, and the drafter's KV if it
    was computed from tokens 0..j + 1, both by a request with the same salt.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.target: KV = {}
        self.drafter: KV = {}
        self.tokens: dict[str, tuple[int, ...]] = {}  # all that the device knows of a request
        self.unread: deque[list[tuple[Request, list[int]]]] = deque()

    def write(
        self,
        kv: KV,
        to: Request,
        j: int,
        value: tuple[int, ...],
    ) -> None:
        size = self.scheduler.allocator.page_size
        if j // size < len(to.pages):
            kv[to.pages[j // size], j % size] = (to.cache_salt, *value)

    def verify(self, of: Request, end: int) -> None:
        """Everything that a row at position `end` would see is right."""
        tokens, size = self.tokens[of.id], self.scheduler.allocator.page_size
        for j in range(min(end, self.scheduler.max_length(of))):
            slot = of.pages[j // size], j % size
            assert self.target[slot] == (of.cache_salt, *tokens[: j + 1])
            assert self.drafter[slot] == (of.cache_salt, *tokens[: j + 2])

    def launch(self, accepted: list[int]) -> StepPlan:
        plan = self.scheduler.plan(STEP_ROWS)
        assert (
            sum(chunk.end - chunk.start for chunk in plan.prefill)
            <= self.scheduler.config.prefill_chunk
        )
        assert not {chunk.request for chunk in plan.prefill} & set(plan.preempted)
        left_out = [
            request
            for request in self.scheduler.running[:-1]
            if request.status == "decode" and request not in plan.decode
        ]
        assert not left_out or any(self.unread), "nothing to read back"
        results = [self.prefill(chunk) for chunk in plan.prefill]
        results += [
            self.decode(each, right) for each, right in zip(plan.decode, accepted, strict=False)
        ]
        self.unread.append([result for result in results if result[1]])
        return plan

    def prefill(self, chunk: Any) -> tuple[Request, list[int]]:
        of = chunk.request
        assert tuple(chunk.ids) == tuple(of.tokens[chunk.start : chunk.end]) and chunk.ids
        self.tokens[of.id] = known = tuple(of.tokens)
        self.verify(of, chunk.start)
        first_token = [] if chunk.next_id is not None else [says(known)]
        self.tokens[of.id] = known = known + tuple(first_token)
        for j in range(chunk.start, chunk.end):
            self.write(self.target, of, j, known[: j + 1])
            self.write(self.drafter, of, j, known[: j + 2])
        self.scheduler.mark_prefilled(chunk)
        return of, first_token

    def decode(self, of: Request, accepted: int) -> tuple[Request, list[int]]:
        known = self.tokens[of.id]
        newest = len(known) - 1
        assert (
            min(newest + STEP_ROWS, self.scheduler.max_length(of))
            <= len(of.pages) * self.scheduler.allocator.page_size
        )
        self.verify(of, newest)
        for _ in range(accepted + 1):
            known += (says(known),)
        for i in range(STEP_ROWS):  # what was rejected is written as well, and overwritten later
            self.write(
                self.target, of, newest + i, known[: newest + i + 1] if i <= accepted else ()
            )
        for i in range(accepted + K):  # so are the drafter's K - 1 mask rows
            self.write(
                self.drafter, of, newest + i, known[: newest + i + 2] if i <= accepted else ()
            )
        self.tokens[of.id] = known
        of.ahead += STEP_ROWS
        return of, list(known[newest + 1 :])

    def read(self) -> None:
        for of, tokens in self.unread.popleft():
            if of.finished:
                continue
            if of.output:
                of.ahead -= STEP_ROWS
                self.scheduler.append(of, tokens[: self.scheduler.max_length(of) - of.length])
            else:
                self.scheduler.append_first(of, tokens[0])
            if of.length == self.scheduler.max_length(of):
                self.scheduler.finish(of, "length")
            elif of.limits.stop_ids & set(tokens):
                self.scheduler.finish(of, "stop")

    def drain(self) -> None:
        """Nobody is forgotten: every step gets the oldest on by a token at least."""
        for steps in range(1000):
            if not self.scheduler.live:
                break
            self.launch([steps % STEP_ROWS] * self.scheduler.config.max_batch)
            while self.unread:
                self.read()
            self.scheduler.check_integrity()
        assert (
            not self.scheduler.live
            and self.scheduler.allocator.num_free == self.scheduler.allocator.num_pages
        )


def right(each: Request) -> bool:
    """Finished, and every token is what the target says after those before it."""
    starts = range(len(each.prompt), each.length)
    return each.finished and all(
        each.tokens[end] == says(tuple(each.tokens[:end])) for end in starts
    )


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
        config = SchedulerConfig(batch, chunk, QUEUE, context=24, answer_slack=slack)
        self.scheduler = Scheduler(PageAllocator(pages, size), config)
        self.engine = Engine(self.scheduler)
        self.requests: list[Request] = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        user=st.sampled_from("abc"),
        stops=st.booleans(),
        salt=st.sampled_from(["", "", "salt"]),
        choices=st.sampled_from([1, 1, 3]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, user: str, stops: bool, salt: str, choices: int
    ) -> None:
        limits = RequestLimits(max_tokens, stop_ids=frozenset([2] if stops else []))
        if len(prompt) >= self.scheduler.context:
            return
        for _ in range(choices):
            id = str(len(self.requests))
            new = Request(id, prompt, Sampling(), limits, user, cache_salt=salt)
            try:
                self.scheduler.add(new)
            except QueueFull:
                assert len(self.scheduler.waiting) >= QUEUE
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
        request = self.scheduler.live.get(str(number))
        if request is not None:
            self.scheduler.finish(request, "abort")
            assert request.finished and request.id not in self.scheduler.live

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


Machine.TestCase.settings = settings(max_examples=70, stateful_step_count=100)
TestMachine = Machine.TestCase


@pytest.mark.slow
class TestMachineForLong(Machine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=100, derandomize=False)


@pytest.mark.parametrize(
    "depth", [0, 1, 2]
)  # results that are not read back when the next step is launched
def test_ten_thousand_operations(depth: int) -> None:
    chance, requests = random.Random(depth), list[Request]()
    scheduler = Scheduler(PageAllocator(14, 3), SchedulerConfig(BATCH, 8, QUEUE, context=30))
    engine = Engine(scheduler)
    for _ in range(3500):
        prompt = [*COMMON[: chance.randrange(9)], chance.randrange(3)]
        new = Request(
            str(len(requests)),
            prompt,
            Sampling(),
            RequestLimits(chance.randint(1, 20)),
            chance.choice("abc"),
        )
        if len(scheduler.waiting) < QUEUE:
            scheduler.add(new)
            requests.append(new)
        if chance.random() < 0.02:
            victim = chance.choice(requests[-8:])
            if not victim.finished:
                scheduler.finish(victim, "abort")
        scheduler.check_integrity()
        engine.launch(chance.choices(range(STEP_ROWS), k=BATCH))
        scheduler.check_integrity()
        while len(engine.unread) > depth:
            engine.read()
            scheduler.check_integrity()
    engine.drain()
    assert all(right(each) for each in requests) and len(requests) > 500
    assert scheduler.preemptions > 100 and scheduler.allocator.hit_tokens > 1000

"""Random operations on the scheduler, with a simulated engine that records the content of pages."""

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


def next_token(tokens: tuple[int, ...]) -> int:
    """The next token of the simulated target."""
    return (sum(tokens) * 5 + len(tokens) // 3) % 3


KV = dict[tuple[int, int], tuple[str | int, ...]]  # salt and tokens, by page and offset


class Engine:
    """A simulated engine: steps run when launched, and their results are read later.

    The KV of position j is right if it was computed from tokens 0..j, and the drafter's KV if it
    was computed from tokens 0..j + 1, both by a request with the same salt.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.target: KV = {}
        self.drafter: KV = {}
        self.tokens: dict[str, tuple[int, ...]] = {}  # tokens of each request on the device
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

    def verify(self, request: Request, end: int) -> None:
        """Assert that all KV entries before position `end` are right."""
        tokens, size = self.tokens[request.id], self.scheduler.allocator.page_size
        for j in range(min(end, self.scheduler.max_length(request))):
            slot = request.pages[j // size], j % size
            assert self.target[slot] == (request.cache_salt, *tokens[: j + 1])
            assert self.drafter[slot] == (request.cache_salt, *tokens[: j + 2])

    def launch(self, accepted: list[int]) -> StepPlan:
        plan = self.scheduler.plan(STEP_ROWS)
        assert (
            sum(chunk.end - chunk.start for chunk in plan.prefill)
            <= self.scheduler.config.prefill_chunk
        )
        assert not {chunk.request for chunk in plan.prefill} & set(plan.preempted)
        skipped = [
            request
            for request in self.scheduler.running[:-1]
            if request.status == "decode" and request not in plan.decode
        ]
        assert not skipped or any(self.unread), (
            "a request was left out although no result is pending"
        )
        results = [self.prefill(chunk) for chunk in plan.prefill]
        results += [
            self.decode(each, count) for each, count in zip(plan.decode, accepted, strict=False)
        ]
        self.unread.append([result for result in results if result[1]])
        return plan

    def prefill(self, chunk: Any) -> tuple[Request, list[int]]:
        request = chunk.request
        assert tuple(chunk.ids) == tuple(request.tokens[chunk.start : chunk.end]) and chunk.ids
        self.tokens[request.id] = known = tuple(request.tokens)
        self.verify(request, chunk.start)
        first_token = [] if chunk.next_id is not None else [next_token(known)]
        self.tokens[request.id] = known = known + tuple(first_token)
        for j in range(chunk.start, chunk.end):
            self.write(self.target, request, j, known[: j + 1])
            self.write(self.drafter, request, j, known[: j + 2])
        self.scheduler.mark_prefilled(chunk)
        return request, first_token

    def decode(self, request: Request, accepted: int) -> tuple[Request, list[int]]:
        known = self.tokens[request.id]
        newest = len(known) - 1
        assert (
            min(newest + STEP_ROWS, self.scheduler.max_length(request))
            <= len(request.pages) * self.scheduler.allocator.page_size
        )
        self.verify(request, newest)
        for _ in range(accepted + 1):
            known += (next_token(known),)
        for i in range(STEP_ROWS):  # Rejected rows are written, too, and later overwritten.
            self.write(
                self.target, request, newest + i, known[: newest + i + 1] if i <= accepted else ()
            )
        for i in range(accepted + K):  # So are the K - 1 mask rows of the drafter.
            self.write(
                self.drafter, request, newest + i, known[: newest + i + 2] if i <= accepted else ()
            )
        self.tokens[request.id] = known
        request.ahead += STEP_ROWS
        return request, list(known[newest + 1 :])

    def read(self) -> None:
        for request, tokens in self.unread.popleft():
            if request.finished:
                continue
            if request.output:
                request.ahead -= STEP_ROWS
                self.scheduler.append(
                    request, tokens[: self.scheduler.max_length(request) - request.length]
                )
            else:
                self.scheduler.append_first(request, tokens[0])
            if request.length == self.scheduler.max_length(request):
                self.scheduler.finish(request, "length")
            elif request.limits.stop_ids & set(tokens):
                self.scheduler.finish(request, "stop")

    def drain(self) -> None:
        """Run until all requests have finished, within a limit that detects starvation."""
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


def is_right(each: Request) -> bool:
    """Whether the request has finished with the tokens of the target."""
    starts = range(len(each.prompt), each.length)
    return each.finished and all(
        each.tokens[end] == next_token(tuple(each.tokens[:end])) for end in starts
    )


COMMON = [0, 1, 2, 1, 0, 0, 1, 2, 2, 0, 1, 0, 2, 1]  # prefix of many prompts
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
        """Launch a step, then read the step before, as a pipelined engine does."""
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
    @rule(index=st.integers(0, 20 * BATCH))
    def fail(self, index: int) -> None:
        if index < len(self.scheduler.running):
            self.scheduler.finish(self.scheduler.running[index], "error", "not a number")

    @invariant()
    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            assert all(is_right(each) for each in self.requests)


Machine.TestCase.settings = settings(max_examples=70, stateful_step_count=100)
TestMachine = Machine.TestCase


@pytest.mark.slow
class TestMachineSlow(Machine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=100, derandomize=False)


# `depth`: steps that are not read back when the next one is launched.
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ten_thousand_operations(depth: int) -> None:
    rng, requests = random.Random(depth), list[Request]()
    scheduler = Scheduler(PageAllocator(14, 3), SchedulerConfig(BATCH, 8, QUEUE, context=30))
    engine = Engine(scheduler)
    for _ in range(3500):
        prompt = [*COMMON[: rng.randrange(9)], rng.randrange(3)]
        new = Request(
            str(len(requests)),
            prompt,
            Sampling(),
            RequestLimits(rng.randint(1, 20)),
            rng.choice("abc"),
        )
        if len(scheduler.waiting) < QUEUE:
            scheduler.add(new)
            requests.append(new)
        if rng.random() < 0.02:
            victim = rng.choice(requests[-8:])
            if not victim.finished:
                scheduler.finish(victim, "abort")
        scheduler.check_integrity()
        engine.launch(rng.choices(range(STEP_ROWS), k=BATCH))
        scheduler.check_integrity()
        while len(engine.unread) > depth:
            engine.read()
            scheduler.check_integrity()
    engine.drain()
    assert all(is_right(each) for each in requests) and len(requests) > 500
    assert scheduler.preemptions > 100 and scheduler.allocator.hit_tokens > 1000

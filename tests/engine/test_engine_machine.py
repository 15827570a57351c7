"""Random operations on an engine: nothing leaks, and every answer is right."""

from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peagle.core import METHODS, Method, Step
from peagle.engine.schedule.queue import QueueFull
from peagle.engine.stream import Stream
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import SETTINGS, ask, engine_of, reference_steps, some_requests
from tests.support.engine.planting import plant_random
from tests.support.grammars import FUZZ_GRAMMARS, small_with_letters

REQUESTS = [
    (ids, {"max_tokens": 9 + 5 * i % 11, "seed": i, **SETTINGS[5 * i % len(SETTINGS)]})
    for i, (ids, _) in enumerate(some_requests(24, seed=2))
]
REQUESTS += [
    (ids, {"max_tokens": 16, "seed": i, "grammar": grammar, **SETTINGS[3 * i % len(SETTINGS)]})
    for i, ((ids, _), grammar) in enumerate(
        zip(some_requests(len(FUZZ_GRAMMARS), seed=4), FUZZ_GRAMMARS, strict=True)
    )
]
# Options of the plain loop.
PLAIN_OPTIONS = {
    "max_tokens",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
}
QUEUE = 5


@cache
def expected(number: int) -> list[int]:
    """The answer of a single request, without speculation."""
    return ask(
        engine_of(small_with_letters(), "none", prefix_caching=False),
        REQUESTS[number][0],
        **REQUESTS[number][1],
    )[0]


@cache
def expected_steps(number: int, method: Method) -> list[Step]:
    return reference_steps(small_with_letters(), method, REQUESTS[number][0], **REQUESTS[number][1])


class Machine(RuleBasedStateMachine):
    @initialize(
        method=st.sampled_from(METHODS),
        k=st.sampled_from([3, 3, 3, 5, "auto"]),
        tree=st.sampled_from([0, 0, 9, 15]),  # for parallel drafters
        page=st.integers(2, 6),
        tokens=st.integers(66, 110),  # The longest request fits, but two of them barely do.
        batch=st.integers(1, 5),
        chunk=st.integers(3, 40),
        caching=st.booleans(),
        lookahead=st.sampled_from([0, 1]),  # passes in flight while the next one is planned
        plants=st.booleans(),  # Plant drafts with a part of the right answer.
    )
    def start(
        self,
        method: Method,
        k: int | str,
        tree: int,
        page: int,
        tokens: int,
        batch: int,
        chunk: int,
        caching: bool,
        lookahead: int,
        plants: bool,
    ) -> None:
        options: dict[str, Any] = {
            "page_size": page,
            "kv_tokens": tokens,
            "max_batch": batch,
            "prefill_chunk": chunk,
            "max_queue": QUEUE,
            "tree": tree if method == "p-eagle" else 0,
            "prefix_caching": caching,
        }
        if options["tree"]:
            options["kv_tokens"] += tree  # a request needs the pages of its nodes as well
        self.engine = engine_of(small_with_letters(), method, k, **options)
        self.engine.loop.lookahead = lookahead
        self.rng = Random(0) if plants else None
        self.has_plain_steps = k == 3 and not options["tree"] and not plants
        self.streams = dict[str, tuple[int, Stream]]()
        self.added = 0  # since the last drain

    @rule(
        number=st.integers(0, len(REQUESTS) - 1),
        user=st.sampled_from("ab"),
        salt=st.sampled_from(["", "", "salt"]),
        choices=st.sampled_from([1, 1, 3]),
    )
    def add(self, number: int, user: str, salt: str, choices: int) -> None:
        ids, options = REQUESTS[number]
        self.added += choices
        for _ in range(choices):
            full = len(self.engine.loop.scheduler.waiting) >= QUEUE
            try:
                stream = self.engine.add(ids, user=user, cache_salt=salt, **options)
            except QueueFull:
                assert full
            else:
                assert not full
                self.streams[stream.id] = number, stream

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            busy = self.engine.busy
            assert self.engine.step() == busy, "requests wait, but the step did nothing"
            self.engine.check_integrity()
            if self.rng is not None:
                live = self.engine.loop.states.keys() & self.streams.keys()
                answers = {id: expected(self.streams[id][0]) for id in live}
                plant_random(self.engine, answers, self.rng)

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 100))
    def abort(self, number: int) -> None:
        self.engine.abort(list(self.streams)[-1 - number % len(self.streams)])

    # With K auto, the number of live requests depends on timing; preconditions must not.
    @precondition(lambda self: self.added > 3)
    @rule()
    def drain(self) -> None:
        self.added = 0
        self.engine.drain()
        assert not self.engine.loop.states

    @invariant()
    def check_integrity(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        self.engine.check_integrity()
        assert not self.engine.loop.states and self.engine.idle
        for number, stream in self.streams.values():
            self.check(number, stream)

    def check(self, number: int, stream: Stream) -> None:
        """Check the answer, or its beginning after an abort, and accepted drafts."""
        pieces = list(stream)
        steps, truth = [piece.step for piece in pieces if piece.step], expected(number)
        tokens = tokens_of(steps)
        assert tokens == (truth[: len(tokens)] if pieces[-1].reason == "abort" else truth)
        if self.has_plain_steps and REQUESTS[number][1].keys() <= PLAIN_OPTIONS:
            assert steps == expected_steps(number, self.engine.method)[: len(steps)]


Machine.TestCase.settings = settings(max_examples=16, stateful_step_count=50)
TestMachine = Machine.TestCase


@pytest.mark.slow
class TestMachineSlow(Machine.TestCase):
    settings = settings(max_examples=120, stateful_step_count=60, derandomize=False)

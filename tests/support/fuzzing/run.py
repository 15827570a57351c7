"""Runs a fuzz case: answers must equal plain decoding, and nothing may leak."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from random import Random
from typing import Any

import torch

from peagle.draft_shape import DraftShape
from peagle.engine import Engine, EngineConfig
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.draft_policy import DraftChoice
from peagle.engine.stream import Stream
from tests.support.engine.planting import plant_random
from tests.support.fuzzing.case import FuzzCase, FuzzRequest
from tests.support.fuzzing.outcome import Outcome, check_limits, difference, read_outcome
from tests.support.fuzzing.targets import fuzz_pair

MAX_STEPS = 5000  # A case takes at most a few hundred steps.
NEAR_TIE = 2e-4  # In logits; float32 sums in another order differ by less.
NUDGES = 8  # Attempts to distinguish a near tie from an error.


class WrongAnswer(AssertionError):
    """An answer differs from plain decoding."""


@dataclass
class FuzzCounts:
    """Counts of events that the cases covered."""

    cases: int = 0
    requests: int = 0
    tokens: int = 0
    accepted: int = 0  # drafts
    preemptions: int = 0
    prefix_hits: int = 0  # tokens
    aborted: int = 0
    grammars: int = 0  # requests
    near_ties: int = 0

    def __iadd__(self, other: "FuzzCounts") -> "FuzzCounts":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def __str__(self) -> str:
        return ", ".join(
            f"{getattr(self, f.name)} {f.name.replace('_', ' ')}" for f in fields(self)
        )


class RandomPolicy:
    """Chooses a random shape for every step, instead of adaptive drafting by measured times."""

    def __init__(self, candidates: Sequence[DraftShape], seed: int) -> None:
        self.candidates = candidates
        self.chance = Random(seed)

    def choose(
        self,
        batch: int,
        draft_confidence: Sequence[float] | None = None,
        chains_only: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        shapes = [shape for shape in self.candidates if shape.is_chain or not chains_only]
        return DraftChoice(self.chance.choice(shapes), "random")

    def observe(
        self,
        batch: int,
        shape: DraftShape,
        seconds: float | None,
        accepted: Sequence[AcceptedCounts],
    ) -> None:
        pass


def run_case(case: FuzzCase) -> FuzzCounts:
    """Raise WrongAnswer or another AssertionError if the engine fails."""
    engine = build_engine(case)
    reference = reference_engine(case, engine)
    expected = [answer_alone(reference, request) for request in case.requests]
    outcomes = [read_outcome(stream) for stream in serve_case(engine, case, expected)]
    scheduler = engine.loop.scheduler
    counts = FuzzCounts(
        cases=1,
        requests=len(outcomes),
        tokens=sum(len(outcome.tokens) for outcome in outcomes),
        accepted=sum(outcome.accepted for outcome in outcomes),
        preemptions=scheduler.preemptions,
        prefix_hits=scheduler.allocator.hit_tokens,
        aborted=sum(outcome.reason == "abort" for outcome in outcomes),
        grammars=sum("grammar" in request.options for request in case.requests),
    )
    for index, request in enumerate(case.requests):
        found = outcomes[index]
        message = difference(found, expected[index], engine.exact)
        check_limits(request, found, engine)
        if found.reason == "abort" and request.abort_after is request.abort_at_piece is None:
            message = "aborted, and nobody asked for it"
        if message is None:
            continue
        if not engine.exact and is_near_tie(reference, request, found, expected[index]):
            counts.near_ties += 1
        else:
            raise WrongAnswer(f"request {index} of {case.target!r}: {message}")
    return counts


def build_engine(case: FuzzCase) -> Engine:
    engine = Engine(fuzz_pair(case.target), EngineConfig(thread=False, **case.engine))
    engine.loop.lookahead = case.lookahead
    policy = engine.loop.drafts.policy
    if case.shape_seed is not None and isinstance(policy, AdaptivePolicy):
        engine.loop.drafts.policy = RandomPolicy(policy.candidates, case.shape_seed)
    poison_pages(engine)
    return engine


def poison_pages(engine: Engine) -> None:
    """Fill the KV pages with NaN, so that reading a page before it is written fails."""
    kv_cache = engine.loop.stepper.kv_cache
    end = kv_cache.num_pages * kv_cache.page_size  # Keep the last page.
    for cache in (*kv_cache.keys, *kv_cache.values):
        cache[:end] = torch.nan


def reference_engine(case: FuzzCase, engine: Engine) -> Engine:
    """An engine for single requests, without drafts, chunks, prefix cache or preemption."""
    options: dict[str, Any] = {"page_size": 64}
    if engine.exact:
        options = {"page_size": engine.config.page_size, "exact": True}
    config = EngineConfig(
        method="none",
        k=1,
        max_batch=1,
        context=engine.loop.scheduler.context,
        prefix_caching=False,
        thread=False,
        **options,
    )
    return Engine(fuzz_pair(case.target), config)


def answer_alone(reference: Engine, request: FuzzRequest) -> Outcome:
    stream = reference.add(list(request.prompt), **request.options)
    reference.drain()
    return read_outcome(stream)


def serve_case(engine: Engine, case: FuzzCase, expected: Sequence[Outcome]) -> list[Stream]:
    """Run the engine until every request has ended, and check it after every step."""
    streams: dict[int, Stream] = {}
    answers: dict[str, list[int]] = {}  # Answers of plain decoding by request id.
    rng = None if case.draft_seed is None else Random(case.draft_seed)
    for step in range(MAX_STEPS):
        for index, request in enumerate(case.requests):
            if request.arrival == step:
                streams[index] = stream = add_request(engine, request)
                answers[stream.id] = list(expected[index].tokens)
            if request.abort_after is not None and step == request.arrival + request.abort_after:
                streams[index].abort()
        engine.check_integrity()
        busy = engine.busy
        assert engine.step() == busy, "requests wait, but the step did nothing"
        engine.check_integrity()
        if rng is not None:
            plant_random(engine, answers, rng)
        if not engine.busy and len(streams) == len(case.requests):
            break
    else:
        raise AssertionError(f"{engine.live_requests} requests do not end")
    assert engine.idle and not engine.loop.states, "pages or states are left"
    return [streams[index] for index in range(len(streams))]


def add_request(engine: Engine, request: FuzzRequest) -> Stream:
    """Add a request; ids of requests that have ended are reused."""
    id = next(name for name in map(str, count()) if name not in engine.loop.states)
    stream = engine.add(list(request.prompt), id=id, **request.options)
    pieces = count()

    def abort_when_due() -> None:
        if next(pieces) == request.abort_at_piece:
            stream.abort()

    stream.on_piece(abort_when_due)
    return stream


def is_near_tie(reference: Engine, request: FuzzRequest, found: Outcome, expected: Outcome) -> bool:
    """Whether tiny changes of the logits give the same token in plain decoding.

    Passes with and without drafts sum in another order, so about one token in a million is
    within rounding errors. Tokens after it cannot be compared.
    """
    pairs = enumerate(zip(found.tokens, expected.tokens, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        return False
    given = request.options.get("logit_bias", {})
    for attempt in range(NUDGES):
        rng = Random(attempt)
        addends = {t: rng.uniform(-NEAR_TIE, NEAR_TIE) for t in range(reference.vocab_size)}
        addends |= {found.tokens[position]: NEAR_TIE, expected.tokens[position]: -NEAR_TIE}
        bias = {t: max(-100.0, given.get(t, 0.0) + addend) for t, addend in addends.items()}
        nudged = replace(request, options=request.options | {"logit_bias": bias})
        beginning = answer_alone(reference, nudged).tokens[: position + 1]
        if beginning == found.tokens[: position + 1]:
            return True
    return False

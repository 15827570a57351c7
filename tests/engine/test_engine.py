"""The engine is lossless: each of many requests gets the steps that it would get alone."""

import random
from functools import cache
from itertools import chain, cycle
from typing import Any

import pytest
import torch

from peagle.core import DRAFTER_METHODS, METHODS, Method, Step
from peagle.draft_shape import DraftShape
from peagle.engine import Engine
from peagle.engine.policy.draft_policy import DraftChoice, FixedPolicy
from peagle.engine.schedule import scheduler
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.engine.decoding import PATTERNS, tokens_of, transformers_generate
from tests.support.engine.engines import (
    ASKED,
    COUNT,
    MIXED,
    Asked,
    K,
    alone,
    ask,
    engine_of,
    one_by_one,
    pair_of,
    plant_drafts,
    serve,
    small,
    some_requests,
    steps_of,
)
from tests.support.models.target_cases import targets_and_methods
from tests.support.models.tiny_models import make_drafter, make_target

# Every architecture.


@cache
def pair_with_drafters(target: Target) -> LoadedPair:
    drafters = {
        "p-eagle": make_drafter(target, "p-eagle", 2),
        "eagle3": make_drafter(target, "eagle3", 1),
    }
    return pair_of(target, drafters)


@cache
def generated_by(target: Target) -> list[list[int]]:
    return [transformers_generate(target, ids, COUNT) for ids, _ in ASKED]


@pytest.fixture
def any_pair(any_target: Target) -> LoadedPair:
    return pair_with_drafters(any_target)


@pytest.fixture
def generated(any_target: Target) -> list[list[int]]:
    return generated_by(any_target)


@pytest.mark.parametrize(
    ("any_target", "method"),
    targets_and_methods(["p-eagle"], METHODS),
    indirect=["any_target"],
)
def test_equals_transformers_and_the_plain_loop(
    any_pair: LoadedPair, generated, method: Method
) -> None:
    engine = engine_of(any_pair, method)
    answers = serve(engine, ASKED)
    assert [tokens_of(steps) for steps in answers] == generated
    assert (
        engine.loop.scheduler.preemptions
        and engine.loop.scheduler.allocator.hit_tokens
        and engine.metrics.prefill_passes >= len(ASKED)
    )
    if method != "none":
        assert answers == [alone(any_pair, method, ids, **settings) for ids, settings in ASKED]


def test_whatever_is_accepted(any_pair: LoadedPair, generated) -> None:
    engine, turns = engine_of(any_pair, "p-eagle"), cycle(PATTERNS.values())
    streams = [engine.add(ids, id=str(i), **settings) for i, (ids, settings) in enumerate(ASKED)]
    while engine.step():
        plant_drafts(engine, {str(i): answer for i, answer in enumerate(generated)}, next(turns))
    answers = [steps_of(stream) for stream in streams]
    assert [tokens_of(steps) for steps in answers] == generated
    assert {step.accepted for step in chain(*answers)} >= {0, 2, 3}


# Many requests on a pair whose drafts are accepted.


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_sixty_four_at_once(method: Method) -> None:
    asked = some_requests(64, seed=1)
    asked = [
        (ids, {"max_tokens": 20 + 3 * i % 23, "ignore_eos": True})
        for i, (ids, _) in enumerate(asked)
    ]
    engine = engine_of(small(), method, max_batch=64, kv_tokens=1600, prefill_chunk=256)
    answers = serve(engine, asked, pauses=(0,) * 9 + (1,))
    assert answers == [alone(small(), method, ids, **settings) for ids, settings in asked]
    assert engine.metrics.acceptance_length > 1.5
    assert engine.metrics.drafts > 15 * engine.metrics.steps, "of a pass, in the mean"
    assert engine.loop.scheduler.preemptions and engine.loop.scheduler.allocator.hit_tokens


@cache
def eight_requests() -> tuple[list[Asked], list[list[int]]]:
    """Requests and their answers without drafts."""
    asked = some_requests(8, seed=5, max_tokens=14)
    return asked, [tokens_of(alone(small(), "none", ids, **settings)) for ids, settings in asked]


@pytest.mark.parametrize(
    ("method", "k"),
    [("none", 1), *((method, k) for method in METHODS[1:] for k in (1, 6, "auto"))],
)
def test_any_k_gives_the_same_tokens(method: Method, k: int | str) -> None:
    asked, expected = eight_requests()
    engine = engine_of(small(), method, k, prefix_caching=False)
    assert [tokens_of(steps) for steps in serve(engine, asked)] == expected
    assert engine.loop.scheduler.allocator.hit_tokens == 0


@pytest.mark.parametrize(
    ("method", "k"), [("none", 1), ("p-eagle", 3), ("p-eagle", "auto"), ("eagle3", 2)]
)
def test_a_seed_gives_the_same_answer_beside_anybody(method: Method, k: int | str) -> None:
    asked = list(enumerate(MIXED))
    random.Random(k).shuffle(asked)
    engine = engine_of(small(), method, k)
    answers = serve(engine, [each for _, each in asked])
    assert [tokens_of(steps) for steps in answers] == [one_by_one()[i] for i, _ in asked]
    # With K auto on a CPU, a step may verify long n-gram drafts: fewer requests run at once.
    assert engine.loop.scheduler.preemptions or k == "auto"


def test_processed_distributions_are_those_of_the_plain_loop() -> None:
    plain = [
        i
        for i, (_, s) in enumerate(MIXED)
        if s.keys() <= {"max_tokens", "seed", "temperature", "top_p", "top_k", "min_p"}
    ]
    assert len(plain) > 6
    for i in plain:
        ids, settings = MIXED[i]
        assert one_by_one()[i] == tokens_of(alone(small(), "none", ids, **settings))
    assert len({tuple(answer) for answer in one_by_one()}) == len(MIXED)


def test_without_a_seed_answers_differ(prompt) -> None:
    engine = engine_of(small(), "p-eagle")
    answers = {tuple(ask(engine, prompt(9), temperature=1.5, max_tokens=12)[0]) for _ in range(4)}
    assert len(answers) == 4


# The prefix cache.


@pytest.mark.parametrize("method", METHODS)
def test_a_known_prefix_is_not_computed_again(method: Method, prompt) -> None:
    engine = engine_of(small(), method, kv_tokens=400)
    ids = prompt(40)
    for tail, cached in (([50], 0), ([50], 40), ([51, 52], 36), ([50, 60], 40)):
        before = engine.metrics.cached_tokens
        stream = engine.add(ids + tail, max_tokens=16)
        engine.drain()
        assert steps_of(stream) == alone(small(), method, ids + tail, max_tokens=16)
        assert engine.metrics.cached_tokens - before == cached
    answer = tokens_of(alone(small(), method, [*ids, 50], max_tokens=16))
    more = [*ids, 50, *answer, 9]  # a second turn: the answer is known too
    stream = engine.add(more, max_tokens=16)
    engine.drain()
    assert steps_of(stream) == alone(small(), method, more, max_tokens=16)
    assert engine.metrics.cached_tokens - before == 40 + len(more) // 4 * 4


@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_of_ten_turns_computes_what_is_new(method: Method, prompt) -> None:
    """The drafter's cache is continued too: every step accepts what it accepts without a cache."""
    engine = engine_of(small(), method, kv_tokens=400)
    ids = prompt(60)
    known = 0
    steps: list[Step] = []
    prompt_tokens = cached_tokens = 0
    for turn in range(10):
        stream = engine.add(ids, max_tokens=6 + turn % 3, ignore_eos=True)
        engine.drain()
        answer = steps_of(stream)
        expected = alone(small(), method, ids, max_tokens=6 + turn % 3, ignore_eos=True)
        assert answer == expected
        assert stream.cached_tokens == known // 4 * 4
        prompt_tokens += len(ids)
        cached_tokens += stream.cached_tokens
        steps += answer
        ids = [*ids, *tokens_of(answer)]
        known = len(ids) - 1  # The newest token is not in the pages.
        ids += prompt(80)[60 + turn : 65 + turn]  # the result of a tool
    assert cached_tokens > 0.8 * prompt_tokens
    assert method == "none" or sum(step.accepted for step in steps) > 15


def test_a_preempted_request_keeps_its_first_count_of_cached_tokens(prompt) -> None:
    engine = engine_of(small(), "p-eagle", max_batch=2, kv_tokens=64)
    ask(engine, prompt(12), max_tokens=1)
    asked = [(prompt(12), 8), ([70, *prompt(12)], 0)]
    streams = [engine.add(ids, max_tokens=40, ignore_eos=True) for ids, _ in asked]
    assert [stream.cached_tokens for stream in streams] == [None, None]
    engine.drain()
    assert engine.loop.scheduler.preemptions
    assert engine.metrics.cached_tokens > 8, "the preempted request has found its own pages"
    assert [stream.cached_tokens for stream in streams] == [cached for _, cached in asked]


def without_the_next_token(parent: bytes, tokens: list[int]) -> bytes:
    return parent + bytes(tokens[:-1])


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "by its own tokens alone"])
def test_a_page_is_shared_with_its_next_token_only(
    monkeypatch, method: Method, broken: bool, prompt
) -> None:
    """The drafter's last row of a page reads the token after it, so that token must match too."""
    if broken:  # the test can tell
        monkeypatch.setattr(scheduler, "page_key", without_the_next_token)
    shared, apart = prompt(24), 0
    engine = engine_of(small(), method, prefill_chunk=32, kv_tokens=800)
    for tail in range(10, 16):
        caches = []
        for runner in (engine, engine_of(small(), method, prefill_chunk=32)):
            stream = runner.add([*shared, tail, 3], max_tokens=8)
            runner.step()
            caches.append(computed(runner, stream.id))
            runner.drain()
            assert broken or steps_of(stream) == alone(
                small(), method, [*shared, tail, 3], max_tokens=8
            )
        apart += any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(*caches, strict=True))
    assert apart == (5 if broken else 0)
    assert engine.metrics.cached_tokens == 5 * (24 if broken else 20)


@pytest.mark.parametrize(
    ("name", "method", "chunk"),
    [
        # Fused layers with every method, transformers' own with one; small chunks with one.
        pytest.param(
            *(name, method, chunk),
            marks=[] if method == "p-eagle" or (name, chunk) == ("llama", 64) else pytest.mark.slow,
        )
        for name in ("llama", "gemma2")
        for method in METHODS
        for chunk in (64, 16)
    ],
)
def test_choices_of_one_prompt_share_its_prefill(
    name: str, method: Method, chunk: int, prompt
) -> None:
    """Added at once, they read pages that the same pass writes: of the target and the drafter."""
    target = make_target(name)
    drafters = {m: make_drafter(target, m, 1) for m in DRAFTER_METHODS}
    pair, ids = pair_of(target, drafters), prompt(38)
    options = {"prefill_chunk": chunk, "kv_tokens": 400}
    engine, plain = (engine_of(pair, method, prefix_caching=on, **options) for on in (True, False))
    sampled = [{"max_tokens": 9, "temperature": 1.0, "seed": i} for i in range(4)]
    streams = [engine.add(ids, **settings) for settings in sampled]
    lone = plain.add(ids, **sampled[0])
    for each in (engine, plain):
        while any(request.computed < 38 for request in each.loop.scheduler.live.values()):
            each.step()
            each.check_integrity()
    assert engine.metrics.cached_tokens == 3 * 36  # the last two tokens are on no full page
    # The drafter's row at position 37 has seen the first token of the answer.
    right = [cache[:37] for cache in computed(plain, lone.id)]
    for stream in streams:
        for ours, theirs in zip(computed(engine, stream.id), right, strict=True):
            assert torch.allclose(ours[:37], theirs, atol=1e-5)
    engine.drain()
    expected = [tokens_of(alone(pair, "none", ids, **settings)) for settings in sampled]
    assert [tokens_of(steps_of(stream)) for stream in streams] == expected


def test_requests_with_different_salts_share_no_pages(prompt) -> None:
    engine = engine_of(small(), "p-eagle", kv_tokens=400)
    expected = tokens_of(alone(small(), "none", prompt(30), max_tokens=6))
    for salt, cached in (("", 0), ("one", 0), ("two", 0), ("one", 28), ("", 28)):
        before = engine.metrics.cached_tokens
        assert ask(engine, prompt(30), max_tokens=6, cache_salt=salt)[0] == expected
        assert engine.metrics.cached_tokens - before == cached, salt


def computed(engine: Engine, id: str) -> list[torch.Tensor]:
    """The keys and values of a request's positions, of every layer of target and drafter."""
    request = engine.loop.scheduler.live[id]
    size = engine.loop.scheduler.allocator.page_size
    kv_cache = engine.loop.stepper.kv_cache
    slots = [request.pages[j // size] * size + j % size for j in range(request.computed)]
    index = torch.tensor(slots)
    return [cache[index] for cache in (*kv_cache.keys, *kv_cache.values)]


# What is told besides.


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_targets_own(method: Method) -> None:
    counts = [0, 1, 5, 20, None]
    asked = [
        (
            ids,
            {
                "max_tokens": 10,
                "logprobs": counts[i % 5],
                "temperature": i % 2 * 1.2,
                "seed": i,
                "ignore_eos": True,
            },
        )
        for i, (ids, _) in enumerate(some_requests(10, seed=4))
    ]
    engine = engine_of(small(), method)
    streams = [engine.add(ids, **settings) for ids, settings in asked]
    engine.drain()
    for (ids, settings), stream in zip(asked, streams, strict=True):
        pieces, top = list(stream), settings["logprobs"]
        tokens = tokens_of([piece.step for piece in pieces if piece.step])
        logprobs = list(chain(*(piece.logprobs for piece in pieces)))
        assert [each.token for each in logprobs] == ([] if top is None else tokens)
        rows = (
            small()
            .target.forward(torch.tensor(ids + tokens))
            .logits[len(ids) - 1 : -1]
            .log_softmax(-1)
        )
        for each, row in zip(logprobs, rows, strict=False):
            assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
            assert each.rank == int((row > row[each.token]).sum()) + 1
            best = row.topk(top or 0)
            assert each.top == pytest.approx(
                dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-4
            )


def test_counters_add_up() -> None:
    engine, asked = engine_of(small(), "p-eagle"), some_requests(12, seed=6, max_tokens=12)
    answers = serve(engine, asked)
    steps = list(chain(*answers))
    status = engine.status()
    assert status["generated_tokens"] == sum(len(step.tokens) for step in steps)
    assert status["prompt_tokens"] == sum(len(ids) for ids, _ in asked)
    assert status["drafts"] == sum(step.drafted > 0 for step in steps)
    assert status["draft_tokens"] == sum(step.drafted for step in steps)
    assert (
        status["accepted_tokens"]
        == sum(step.accepted for step in steps)
        == sum(status["accepted_at"])
    )
    assert (
        status["finished"].keys() <= {"stop", "length"} and sum(status["finished"].values()) == 12
    )
    assert (status["waiting"], status["running"], status["kv_usage"]) == (0, 0, 0)
    assert status["k_steps"] == {K: status["steps"]} and status["k_reason"] == "fixed"


def test_an_id_may_come_back_with_other_settings(prompt) -> None:
    engine = engine_of(small(), "p-eagle")
    answers = [
        ask(engine, prompt(6), id="x", temperature=1.5, seed=seed, max_tokens=9)[0]
        for seed in (1, 2)
    ]
    expected = [
        tokens_of(alone(small(), "none", prompt(6), temperature=1.5, seed=s, max_tokens=9))
        for s in (1, 2)
    ]
    assert answers == expected and answers[0] != answers[1]


def test_a_prompt_belongs_to_the_engine_once_it_is_added(prompt) -> None:
    engine, ids = engine_of(small(), "none"), prompt(6)
    stream = engine.add(ids, max_tokens=5)
    ids.clear()
    engine.drain()
    assert steps_of(stream) == alone(small(), "none", prompt(6), max_tokens=5)


def test_a_larger_shape_is_drafted_before_it_is_verified() -> None:
    """A step that must draft more than it verifies drafts what is asked for, and no more."""

    class Alternating(FixedPolicy):
        """Requests chains of 1 and of 3 in turn."""

        def choose(self, *args: Any, **kwargs: Any) -> DraftChoice:
            self.shape = DraftShape(4 - self.shape.k, 4 - self.shape.k)
            return DraftChoice(self.shape, "in turn")

    engine = engine_of(small(), "p-eagle", 7)
    engine.loop.drafts.policy = Alternating(DraftShape(1, 1))
    engine.add([5, 6, 7], max_tokens=20, ignore_eos=True)
    shapes = []
    while engine.step():
        shapes += [state.draft_shape.k for state in engine.loop.states.values()]
    assert shapes[0] == 7 and set(shapes[1:]) == {1, 3}  # The prefill drafts for any shape.

"""The engine is lossless: concurrent requests have the steps of single requests."""

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
    COUNT,
    MIXED,
    REQUESTS,
    EngineRequest,
    K,
    ask,
    engine_of,
    one_by_one,
    pair_of,
    plant_drafts,
    reference_steps,
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
    return [transformers_generate(target, ids, COUNT) for ids, _ in REQUESTS]


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
    answers = serve(engine, REQUESTS)
    assert [tokens_of(steps) for steps in answers] == generated
    assert (
        engine.loop.scheduler.preemptions
        and engine.loop.scheduler.allocator.hit_tokens
        and engine.metrics.prefill_passes >= len(REQUESTS)
    )
    if method != "none":
        assert answers == [
            reference_steps(any_pair, method, ids, **settings) for ids, settings in REQUESTS
        ]


def test_accepted_drafts_do_not_change_answers(any_pair: LoadedPair, generated) -> None:
    engine, turns = engine_of(any_pair, "p-eagle"), cycle(PATTERNS.values())
    streams = [engine.add(ids, id=str(i), **settings) for i, (ids, settings) in enumerate(REQUESTS)]
    while engine.step():
        plant_drafts(engine, {str(i): answer for i, answer in enumerate(generated)}, next(turns))
    answers = [steps_of(stream) for stream in streams]
    assert [tokens_of(steps) for steps in answers] == generated
    assert {step.accepted for step in chain(*answers)} >= {0, 2, 3}


# Many requests on a pair whose drafts are accepted.


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_sixty_four_concurrent_requests(method: Method) -> None:
    requests = some_requests(64, seed=1)
    requests = [
        (ids, {"max_tokens": 20 + 3 * i % 23, "ignore_eos": True})
        for i, (ids, _) in enumerate(requests)
    ]
    engine = engine_of(small(), method, max_batch=64, kv_tokens=1600, prefill_chunk=256)
    answers = serve(engine, requests, pauses=(0,) * 9 + (1,))
    assert answers == [
        reference_steps(small(), method, ids, **settings) for ids, settings in requests
    ]
    assert engine.metrics.acceptance_length > 1.5
    assert engine.metrics.drafts > 15 * engine.metrics.steps, (
        "passes must have 15 requests on average"
    )
    assert engine.loop.scheduler.preemptions and engine.loop.scheduler.allocator.hit_tokens


@cache
def eight_requests() -> tuple[list[EngineRequest], list[list[int]]]:
    """Requests and their answers without drafts."""
    requests = some_requests(8, seed=5, max_tokens=14)
    return requests, [
        tokens_of(reference_steps(small(), "none", ids, **settings)) for ids, settings in requests
    ]


@pytest.mark.parametrize(
    ("method", "k"),
    [("none", 1), *((method, k) for method in METHODS[1:] for k in (1, 6, "auto"))],
)
def test_any_k_gives_the_same_tokens(method: Method, k: int | str) -> None:
    requests, expected = eight_requests()
    engine = engine_of(small(), method, k, prefix_caching=False)
    assert [tokens_of(steps) for steps in serve(engine, requests)] == expected
    assert engine.loop.scheduler.allocator.hit_tokens == 0


@pytest.mark.parametrize(
    ("method", "k"), [("none", 1), ("p-eagle", 3), ("p-eagle", "auto"), ("eagle3", 2)]
)
def test_a_seed_gives_the_same_answer_in_any_batch(method: Method, k: int | str) -> None:
    requests = list(enumerate(MIXED))
    random.Random(k).shuffle(requests)
    engine = engine_of(small(), method, k)
    answers = serve(engine, [each for _, each in requests])
    assert [tokens_of(steps) for steps in answers] == [one_by_one()[i] for i, _ in requests]
    # With K auto on a CPU, steps may verify long n-gram drafts, so fewer requests run at once.
    assert engine.loop.scheduler.preemptions or k == "auto"


def test_answers_with_sampling_options_equal_the_plain_loop() -> None:
    plain = [
        i
        for i, (_, s) in enumerate(MIXED)
        if s.keys() <= {"max_tokens", "seed", "temperature", "top_p", "top_k", "min_p"}
    ]
    assert len(plain) > 6
    for i in plain:
        ids, settings = MIXED[i]
        assert one_by_one()[i] == tokens_of(reference_steps(small(), "none", ids, **settings))
    assert len({tuple(answer) for answer in one_by_one()}) == len(MIXED)


def test_without_a_seed_answers_differ(prompt) -> None:
    engine = engine_of(small(), "p-eagle")
    answers = {tuple(ask(engine, prompt(9), temperature=1.5, max_tokens=12)[0]) for _ in range(4)}
    assert len(answers) == 4


# The prefix cache.


@pytest.mark.parametrize("method", METHODS)
def test_a_cached_prefix_is_not_recomputed(method: Method, prompt) -> None:
    engine = engine_of(small(), method, kv_tokens=400)
    ids = prompt(40)
    for tail, cached in (([50], 0), ([50], 40), ([51, 52], 36), ([50, 60], 40)):
        before = engine.metrics.cached_tokens
        stream = engine.add(ids + tail, max_tokens=16)
        engine.drain()
        assert steps_of(stream) == reference_steps(small(), method, ids + tail, max_tokens=16)
        assert engine.metrics.cached_tokens - before == cached
    answer = tokens_of(reference_steps(small(), method, [*ids, 50], max_tokens=16))
    more = [*ids, 50, *answer, 9]  # The answer is part of the prompt of a second turn.
    stream = engine.add(more, max_tokens=16)
    engine.drain()
    assert steps_of(stream) == reference_steps(small(), method, more, max_tokens=16)
    assert engine.metrics.cached_tokens - before == 40 + len(more) // 4 * 4


@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_of_ten_turns_computes_new_tokens_only(method: Method, prompt) -> None:
    """Every step accepts as many drafts as without a prefix cache."""
    engine = engine_of(small(), method, kv_tokens=400)
    ids = prompt(60)
    reusable = 0
    steps: list[Step] = []
    prompt_tokens = cached_tokens = 0
    for turn in range(10):
        stream = engine.add(ids, max_tokens=6 + turn % 3, ignore_eos=True)
        engine.drain()
        answer = steps_of(stream)
        expected = reference_steps(small(), method, ids, max_tokens=6 + turn % 3, ignore_eos=True)
        assert answer == expected
        assert stream.cached_tokens == reusable // 4 * 4
        prompt_tokens += len(ids)
        cached_tokens += stream.cached_tokens
        steps += answer
        ids = [*ids, *tokens_of(answer)]
        reusable = len(ids) - 1  # The newest token is not in the pages.
        ids += prompt(80)[60 + turn : 65 + turn]  # A tool result follows.
    assert cached_tokens > 0.8 * prompt_tokens
    assert method == "none" or sum(step.accepted for step in steps) > 15


def test_a_preempted_request_keeps_its_first_count_of_cached_tokens(prompt) -> None:
    engine = engine_of(small(), "p-eagle", max_batch=2, kv_tokens=64)
    ask(engine, prompt(12), max_tokens=1)
    requests = [(prompt(12), 8), ([70, *prompt(12)], 0)]
    streams = [engine.add(ids, max_tokens=40, ignore_eos=True) for ids, _ in requests]
    assert [stream.cached_tokens for stream in streams] == [None, None]
    engine.drain()
    assert engine.loop.scheduler.preemptions
    assert engine.metrics.cached_tokens > 8, "the preempted request must reuse its own pages"
    assert [stream.cached_tokens for stream in streams] == [cached for _, cached in requests]


def without_the_next_token(parent: bytes, tokens: list[int]) -> bytes:
    return parent + bytes(tokens[:-1])


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize(
    "wrong_keys", [False, True], ids=["unchanged keys", "keys without the next token"]
)
def test_a_page_is_shared_with_its_next_token_only(
    monkeypatch, method: Method, wrong_keys: bool, prompt
) -> None:
    """The drafter's last row of a page reads the token after it, so that token must match too."""
    if wrong_keys:  # With these keys the test must detect wrong pages.
        monkeypatch.setattr(scheduler, "page_key", without_the_next_token)
    shared, differing = prompt(24), 0
    engine = engine_of(small(), method, prefill_chunk=32, kv_tokens=800)
    for tail in range(10, 16):
        caches = []
        for runner in (engine, engine_of(small(), method, prefill_chunk=32)):
            stream = runner.add([*shared, tail, 3], max_tokens=8)
            runner.step()
            caches.append(kv_of(runner, stream.id))
            runner.drain()
            assert wrong_keys or steps_of(stream) == reference_steps(
                small(), method, [*shared, tail, 3], max_tokens=8
            )
        differing += any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(*caches, strict=True))
    assert differing == (5 if wrong_keys else 0)
    assert engine.metrics.cached_tokens == 5 * (24 if wrong_keys else 20)


@pytest.mark.parametrize(
    ("name", "method", "chunk"),
    [
        # Fused layers are run with every method, small chunks and other layers with one.
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
    """Choices that are added together read pages that the same pass writes."""
    target = make_target(name)
    drafters = {m: make_drafter(target, m, 1) for m in DRAFTER_METHODS}
    pair, ids = pair_of(target, drafters), prompt(38)
    options = {"prefill_chunk": chunk, "kv_tokens": 400}
    engine, plain = (engine_of(pair, method, prefix_caching=on, **options) for on in (True, False))
    sampled = [{"max_tokens": 9, "temperature": 1.0, "seed": i} for i in range(4)]
    streams = [engine.add(ids, **settings) for settings in sampled]
    single = plain.add(ids, **sampled[0])
    for each in (engine, plain):
        while any(request.computed < 38 for request in each.loop.scheduler.live.values()):
            each.step()
            each.check_integrity()
    assert engine.metrics.cached_tokens == 3 * 36  # The last two tokens fill no page.
    # The drafter's row at position 37 has seen the first token of the answer.
    right = [cache[:37] for cache in kv_of(plain, single.id)]
    for stream in streams:
        for ours, theirs in zip(kv_of(engine, stream.id), right, strict=True):
            assert torch.allclose(ours[:37], theirs, atol=1e-5)
    engine.drain()
    expected = [tokens_of(reference_steps(pair, "none", ids, **settings)) for settings in sampled]
    assert [tokens_of(steps_of(stream)) for stream in streams] == expected


def test_requests_with_different_salts_share_no_pages(prompt) -> None:
    engine = engine_of(small(), "p-eagle", kv_tokens=400)
    expected = tokens_of(reference_steps(small(), "none", prompt(30), max_tokens=6))
    for salt, cached in (("", 0), ("one", 0), ("two", 0), ("one", 28), ("", 28)):
        before = engine.metrics.cached_tokens
        assert ask(engine, prompt(30), max_tokens=6, cache_salt=salt)[0] == expected
        assert engine.metrics.cached_tokens - before == cached, salt


def kv_of(engine: Engine, id: str) -> list[torch.Tensor]:
    """Keys and values of all positions of a request, in every layer of target and drafter."""
    request = engine.loop.scheduler.live[id]
    size = engine.loop.scheduler.allocator.page_size
    kv_cache = engine.loop.stepper.kv_cache
    slots = [request.pages[j // size] * size + j % size for j in range(request.computed)]
    index = torch.tensor(slots)
    return [cache[index] for cache in (*kv_cache.keys, *kv_cache.values)]


# Log-probabilities, counters, ids and policies.


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_the_target(method: Method) -> None:
    counts = [0, 1, 5, 20, None]
    requests = [
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
    streams = [engine.add(ids, **settings) for ids, settings in requests]
    engine.drain()
    for (ids, settings), stream in zip(requests, streams, strict=True):
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
    engine, requests = engine_of(small(), "p-eagle"), some_requests(12, seed=6, max_tokens=12)
    answers = serve(engine, requests)
    steps = list(chain(*answers))
    status = engine.status()
    assert status["generated_tokens"] == sum(len(step.tokens) for step in steps)
    assert status["prompt_tokens"] == sum(len(ids) for ids, _ in requests)
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


def test_an_id_can_be_used_again_with_other_settings(prompt) -> None:
    engine = engine_of(small(), "p-eagle")
    answers = [
        ask(engine, prompt(6), id="x", temperature=1.5, seed=seed, max_tokens=9)[0]
        for seed in (1, 2)
    ]
    expected = [
        tokens_of(
            reference_steps(small(), "none", prompt(6), temperature=1.5, seed=s, max_tokens=9)
        )
        for s in (1, 2)
    ]
    assert answers == expected and answers[0] != answers[1]


def test_the_engine_copies_the_prompt(prompt) -> None:
    engine, ids = engine_of(small(), "none"), prompt(6)
    stream = engine.add(ids, max_tokens=5)
    ids.clear()
    engine.drain()
    assert steps_of(stream) == reference_steps(small(), "none", prompt(6), max_tokens=5)


def test_a_larger_shape_is_drafted_before_it_is_verified() -> None:
    """A step drafts the shape that the next step verifies, even if it verifies less itself."""

    class Alternating(FixedPolicy):
        """Alternates between chains of 1 and of 3."""

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

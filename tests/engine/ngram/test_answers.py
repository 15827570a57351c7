"""N-gram drafts do not change answers, with or without a drafter, for any options of requests."""

from typing import Any

import pytest

from peagle.engine import Engine, EngineConfig
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.errors import UserError
from peagle.grammar import Grammar
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    ask,
    engine_of,
    reference_steps,
    serve,
    small,
    small_with_words,
    steps_of,
)
from tests.support.grammars import small_with_letters

PHRASE = [7, 8, 9, 10, 11, 12]
DRAFTING: list[dict[str, Any]] = [
    {"method": "ngram", "k": 4},
    {"method": "ngram", "k": "auto"},
    {"method": "p-eagle", "k": 3, "ngram": True},
    {"method": "p-eagle", "k": "auto", "ngram": True},
    {"method": "p-eagle", "k": 4, "tree": 9, "ngram": True},
    {"method": "eagle3", "k": "auto", "ngram": True},
]


def make_requests(**settings: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Eight prompts with repeated phrases and common prefixes."""
    return [
        (PHRASE * 3 + [20 + i] + PHRASE[: 2 + i % 3], {"max_tokens": 24, "seed": i, **settings})
        for i in range(8)
    ]


@pytest.mark.parametrize("drafting", DRAFTING, ids=str)
def test_eight_requests_get_the_answers_of_none(drafting: dict[str, Any]) -> None:
    pair = small_with_words()
    requests = make_requests(ignore_eos=True)
    requests[1::2] = make_requests(temperature=0.9, top_p=0.9)[1::2]
    requests[2][1]["stop"] = ("w35",)
    plain = [tokens_of(steps) for steps in serve(engine_of(pair, "none"), requests)]
    engine = engine_of(pair, **drafting)
    steps = serve(engine, requests)
    assert [tokens_of(each) for each in steps] == plain
    assert any(step.accepted for each in steps for step in each)
    # Adaptive drafting depends on measured times, so its need for pages varies.
    assert engine.loop.scheduler.preemptions or drafting["k"] == "auto"
    assert engine.loop.scheduler.allocator.hit_tokens


@pytest.mark.parametrize("drafting", DRAFTING, ids=str)
def test_grammars(drafting: dict[str, Any]) -> None:
    pair = small_with_letters()
    grammar = Grammar.regex("(abab|ba){3,8}")
    requests = [(ids, {"max_tokens": 30, "grammar": grammar}) for ids, _ in make_requests()[:3]]
    plain = [tokens_of(steps) for steps in serve(engine_of(pair, "none"), requests)]
    assert [tokens_of(steps) for steps in serve(engine_of(pair, **drafting), requests)] == plain


def test_drafts_of_one_request_equal_the_reference() -> None:
    for ids, settings in make_requests(ignore_eos=True)[:4]:
        engine = engine_of(small(), "ngram", 4)
        stream = engine.add(ids, **settings)
        engine.drain()
        assert steps_of(stream) == reference_steps(small(), "ngram", ids, 4, **settings)


def test_the_drafter_continues_after_ngrams() -> None:
    """The KV cache of the drafter is up to date, so its drafts do not depend on n-grams."""
    ids, settings = make_requests(ignore_eos=True)[0]
    engine = engine_of(small(), "p-eagle", 3, ngram=True, max_batch=1)
    ngrams = engine._stepper.slots.ngram
    assert isinstance(ngrams, HostNgramSlots)
    stream = engine.add(ids, **settings)
    while engine.metrics.steps < 3:
        engine.step()
    engine.loop.drafts.ngram = None  # From now on the drafter drafts.
    ngrams.min_match = [99] * len(ngrams.min_match)
    ngrams.skips_drafter = False
    engine.drain()
    steps = steps_of(stream)
    plain = reference_steps(small(), "p-eagle", ids, 3, **settings)
    tokens = len(tokens_of(steps[:5]))  # The first of these steps verifies an n-gram draft.
    assert any(len(tokens_of(plain[:i])) == tokens for i in range(len(plain)))
    assert steps[5:] == plain[next(i for i in range(99) if len(tokens_of(plain[:i])) == tokens) :]


def test_ngrams_are_the_default_on_a_cpu() -> None:
    for k, tree, expected in (("auto", None, True), ("auto", 9, False), (3, None, False)):
        engine = engine_of(small(), "p-eagle", k, tree=tree)
        assert engine.ngram == expected
    assert not engine_of(small(), "none").ngram
    assert engine_of(small(), "p-eagle", "auto", ngram=False).max_k == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(method="none", ngram=True), "set `method` to ngram"),
        (EngineConfig(method="ngram", ngram=False), "leave out `ngram`"),
        (EngineConfig(method="ngram", k=3, tree=9), "Leave out `tree`"),
    ],
)
def test_invalid_configs_are_refused(config: EngineConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Engine(small(), config)


def test_generate() -> None:
    pair = small()
    plain = pair.generate(PHRASE * 4, method="none", max_tokens=30)
    for options in ({"method": "ngram"}, {"method": "ngram", "k": 5}, {"ngram": True}):
        answer = pair.generate(PHRASE * 4, max_tokens=30, **options)
        assert answer.token_ids == plain.token_ids and answer.acceptance_length > 1
    assert ask(engine_of(pair, "ngram"), PHRASE * 4, max_tokens=30)[0] == plain.token_ids

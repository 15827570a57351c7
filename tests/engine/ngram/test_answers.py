"""N-gram drafts change no answer: alone, beside a drafter, with all that a request may ask for."""

from typing import Any

import pytest

from peagle.engine import Engine, EngineConfig
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.errors import UserError
from peagle.grammar import Grammar
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    alone,
    ask,
    engine_of,
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


def requests(**settings: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Eight prompts that repeat themselves, and share prefixes."""
    return [
        (PHRASE * 3 + [20 + i] + PHRASE[: 2 + i % 3], {"max_tokens": 24, "seed": i, **settings})
        for i in range(8)
    ]


@pytest.mark.parametrize("drafting", DRAFTING, ids=str)
def test_eight_requests_get_the_answers_of_none(drafting: dict[str, Any]) -> None:
    pair = small_with_words()
    asked = requests(ignore_eos=True)
    asked[1::2] = requests(temperature=0.9, top_p=0.9)[1::2]
    asked[2][1]["stop"] = ("w35",)
    plain = [tokens_of(steps) for steps in serve(engine_of(pair, "none"), asked)]
    engine = engine_of(pair, **drafting)
    steps = serve(engine, asked)
    assert [tokens_of(each) for each in steps] == plain
    assert any(step.accepted for each in steps for step in each)
    # Adaptive drafting follows measured times: how many pages it needs is not known before.
    assert engine.loop.scheduler.preemptions or drafting["k"] == "auto"
    assert engine.loop.scheduler.allocator.hit_tokens


@pytest.mark.parametrize("drafting", DRAFTING, ids=str)
def test_grammars(drafting: dict[str, Any]) -> None:
    pair = small_with_letters()
    grammar = Grammar.regex("(abab|ba){3,8}")
    asked = [(ids, {"max_tokens": 30, "grammar": grammar}) for ids, _ in requests()[:3]]
    plain = [tokens_of(steps) for steps in serve(engine_of(pair, "none"), asked)]
    assert [tokens_of(steps) for steps in serve(engine_of(pair, **drafting), asked)] == plain


def test_a_request_alone_drafts_what_the_reference_drafts() -> None:
    for ids, settings in requests(ignore_eos=True)[:4]:
        engine = engine_of(small(), "ngram", 4)
        stream = engine.add(ids, **settings)
        engine.drain()
        assert steps_of(stream) == alone(small(), "ngram", ids, 4, **settings)


def test_the_drafter_goes_on_where_ngrams_end() -> None:
    """Its KV cache is up to date: its drafts are those of an engine without n-grams."""
    ids, settings = requests(ignore_eos=True)[0]
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
    plain = alone(small(), "p-eagle", ids, 3, **settings)
    tokens = len(tokens_of(steps[:5]))  # The first step verifies what was drafted before.
    assert any(len(tokens_of(plain[:i])) == tokens for i in range(len(plain)))
    assert steps[5:] == plain[next(i for i in range(99) if len(tokens_of(plain[:i])) == tokens) :]


def test_drafts_by_lookup_are_the_default_on_a_cpu() -> None:
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
def test_what_cannot_be_is_refused(config: EngineConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Engine(small(), config)


def test_generate() -> None:
    pair = small()
    plain = pair.generate(PHRASE * 4, method="none", max_tokens=30)
    for options in ({"method": "ngram"}, {"method": "ngram", "k": 5}, {"ngram": True}):
        answer = pair.generate(PHRASE * 4, max_tokens=30, **options)
        assert answer.token_ids == plain.token_ids and answer.acceptance_length > 1
    assert ask(engine_of(pair, "ngram"), PHRASE * 4, max_tokens=30)[0] == plain.token_ids

"""The thinking part: its budget forces its end, and a grammar applies only to what follows.

Drafts do not change answers.
"""

import re
from functools import cache
from itertools import cycle
from typing import Any

import pytest

from peagle.core import METHODS, Method
from peagle.engine import Engine
from peagle.engine.thinking import Thinking
from peagle.errors import UserError
from peagle.grammar import Grammar
from tests.support.engine.decoding import PATTERNS, tokens_of
from tests.support.engine.engines import (
    ask,
    engine_of,
    plant_drafts,
    serve,
    small,
    some_requests,
    steps_of,
)
from tests.support.grammars import VOCAB, bound_pair

# The forced end; "ok" is the end marker.
END = tuple(VOCAB.index(letter) for letter in ("Q", "ok", "Q"))
GRAMMAR = Grammar.regex("(ab|12){2,4}")
EOS = 1


def thinking(budget: int | None, **fields: Any) -> Thinking:
    return Thinking(**{"ends": ("ok",), "forced_end": END, "budget": budget} | fields)


def inside(budget: int | None) -> Thinking:
    return thinking(budget, starts_inside=True)


def outside(budget: int | None, start: str) -> Thinking:
    ids = tuple(VOCAB.index(letter) for letter in start)
    return thinking(budget, start=start, start_ids=ids)


def engine(method: str = "none", k: int | str = 3, **options: Any) -> Engine:
    return engine_of(bound_pair(), method, k, **{"kv_tokens": 1200} | options)


def text_of(tokens: list[int]) -> str:
    return "".join(VOCAB[token] for token in tokens)


PROMPTS = [ids for ids, _ in some_requests(6, seed=2)]
# Without a forced end, none of these answers has "ok".
FREE = {"max_tokens": 24, "ignore_eos": True}
BOUND = {"max_tokens": 40, "grammar": GRAMMAR}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    *((ids, FREE | {"thinking": inside(n)}) for ids, n in zip(PROMPTS, range(6), strict=True)),
    *((ids, BOUND | {"thinking": inside(n)}) for ids, n in zip(PROMPTS, range(6), strict=True)),
    (PROMPTS[0], FREE | {"thinking": inside(6), "temperature": 1.3, "seed": 3}),
    (PROMPTS[1], BOUND | {"thinking": inside(7), "temperature": 1.3, "seed": 4, "min_tokens": 30}),
    (PROMPTS[2], BOUND | {"thinking": inside(9), "logit_bias": {EOS: 100.0}}),
    (PROMPTS[3], BOUND | {"thinking": outside(4, "XY"), "logit_bias": {VOCAB.index("X"): 100.0}}),
    (PROMPTS[4], BOUND | {"thinking": outside(4, "XY"), "logit_bias": {VOCAB.index("X"): -100.0}}),
]


@cache
def without_drafts() -> list[list[int]]:
    plain_engine = engine(prefix_caching=False)
    return [ask(plain_engine, ids, **settings)[0] for ids, settings in REQUESTS]


def test_forced_end() -> None:
    """Tokens within the budget are those of an answer without one; then the end is forced."""
    for (ids, settings), tokens in zip(REQUESTS[:6], without_drafts(), strict=False):
        budget = settings["thinking"].budget
        free = ask(engine(), ids, **FREE)[0]
        assert "ok" not in text_of(free)
        assert tokens[:budget] == free[:budget]
        assert tuple(tokens[budget : budget + 3]) == END
        following = ask(engine(), ids + tokens[: budget + 3], **FREE)[0]
        assert tokens[budget + 3 :] == following[: 24 - budget - 3]


def test_grammar_follows() -> None:
    for (_, settings), tokens in zip(REQUESTS[6:15], without_drafts()[6:], strict=False):
        budget = settings["thinking"].budget
        if "grammar" in settings:
            assert tuple(tokens[budget : budget + 3]) == END
            assert EOS not in tokens[:-1]
            answer = text_of([token for token in tokens[budget + 3 :] if token != EOS])
            assert re.fullmatch("(ab|12){2,4}", answer)


def test_start_marker() -> None:
    """With a grammar, an answer begins with the whole start marker or with the grammar."""
    *_, with_start, direct = without_drafts()
    assert text_of(with_start).startswith("XY") and tuple(with_start[6:9]) == END
    assert re.fullmatch("(ab|12){2,4}", text_of([token for token in direct if token != EOS]))


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("k", [3, 7, "auto"])
def test_drafts_do_not_change_answers(method: Method, k: int | str) -> None:
    answers = serve(engine(method, k), REQUESTS)
    assert [tokens_of(steps) for steps in answers] == without_drafts()


def test_accepted_drafts_do_not_change_answers() -> None:
    planted = engine("p-eagle")
    turns = cycle(PATTERNS.values())
    streams = [
        planted.add(ids, id=str(i), **settings) for i, (ids, settings) in enumerate(REQUESTS)
    ]
    answers = {str(i): answer for i, answer in enumerate(without_drafts())}
    while planted.step():
        plant_drafts(planted, answers, next(turns))
    steps = [steps_of(stream) for stream in streams]
    assert [tokens_of(each) for each in steps] == without_drafts()
    assert {step.accepted for each in steps for step in each} == {0, 1, 2, 3}


def test_trees_return_after_the_thinking_part() -> None:
    """Steps verify chains while a request thinks, and trees again afterwards."""
    pair = bound_pair()
    with_trees = engine_of(pair, "p-eagle", 3, kv_tokens=1200, tree=8)
    requests = [(ids, FREE | {"thinking": inside(4)}) for ids in PROMPTS[:2]]
    expected = [ask(engine(), ids, **settings)[0] for ids, settings in requests]
    answers = serve(with_trees, requests)
    assert [tokens_of(steps) for steps in answers] == expected
    assert {3, 8} <= set(with_trees.metrics.k_steps)


def test_a_natural_end() -> None:
    """A thinking part that ends within its budget is not changed."""
    free = ask(engine(), PROMPTS[0], **FREE)[0]
    marker = text_of(free[7:8])
    first = next(i for i, token in enumerate(free) if marker in text_of([token]))
    for budget in (first + 1, 20, None):
        part = thinking(budget, ends=(marker,), starts_inside=True)
        for method in METHODS:
            assert ask(engine(method), PROMPTS[0], thinking=part, **FREE)[0] == free
    part = thinking(None, ends=(marker,), starts_inside=True)
    bound = ask(engine("p-eagle"), PROMPTS[0], thinking=part, **BOUND)[0]
    assert bound[: first + 1] == free[: first + 1]
    answer = text_of([token for token in bound[first + 1 :] if token != EOS])
    assert re.fullmatch("(ab|12){2,4}", answer)


def test_marker_of_several_tokens() -> None:
    free = ask(engine(), PROMPTS[1], **FREE)[0]
    marker = text_of(free[3:6])
    part = thinking(12, ends=(marker,), starts_inside=True)
    for method in METHODS:
        assert ask(engine(method), PROMPTS[1], thinking=part, **FREE)[0] == free


def test_start_without_a_grammar() -> None:
    """The budget counts from the start marker; answers without it have no thinking part."""
    free = ask(engine(), PROMPTS[2], **FREE)[0]
    start = text_of(free[:2])
    with_start = thinking(2, start=start, start_ids=tuple(free[:2]))
    for method in METHODS:
        tokens = ask(engine(method), PROMPTS[2], thinking=with_start, **FREE)[0]
        assert tokens[:4] == free[:4] and tuple(tokens[4:7]) == END
        other = thinking(2, start="XY", start_ids=(5, 6))
        assert ask(engine(method), PROMPTS[2], thinking=other, **FREE)[0] == free


def test_preempted() -> None:
    requests = [(ids[:8], settings) for ids, settings in REQUESTS]
    expected = [ask(engine(), ids, **settings)[0] for ids, settings in requests]
    tight = engine("p-eagle", kv_tokens=100)
    assert [tokens_of(steps) for steps in serve(tight, requests)] == expected
    assert tight.loop.scheduler.preemptions


def test_min_tokens_with_a_grammar() -> None:
    """Tokens of the thinking part count toward min_tokens."""
    settings = {"grammar": Grammar.regex("a{2,9}"), "logit_bias": {EOS: 100.0}}
    tokens = ask(engine(), [10, 20], thinking=inside(3), min_tokens=11, **settings)[0]
    assert text_of(tokens[6:-1]) == "a" * 5 and tokens[-1] == EOS


@pytest.mark.parametrize(
    "fields",
    [{"ends": ()}, {"forced_end": ()}, {"starts_inside": False}, {"budget": -1}],
    ids=str,
)
def test_wrong_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="thinking"):
        Thinking(**{"ends": ("ok",), "forced_end": (1,), "starts_inside": True} | fields)


def test_needs_a_tokenizer() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        engine_of(small(), "none").add([5, 6], thinking=inside(3))


def test_forced_tokens_that_are_not_allowed() -> None:
    """They are refused, because a step could not force them."""
    plain = engine()
    for fields in ({"forced_end": (10**6,)}, {"start": "X", "start_ids": (10**6,)}):
        with pytest.raises(UserError, match="vocabulary"):
            plain.add([5, 6], thinking=thinking(2, **fields | {"starts_inside": True}))
    with pytest.raises(UserError, match="min_tokens"):
        plain.add([5, 6], thinking=inside(2), min_tokens=9, stop_ids={END[1]})
    assert ask(plain, PROMPTS[0], thinking=inside(2), stop_ids={END[1]})[0][-1] == END[1]

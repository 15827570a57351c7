"""How answers end: stop ids, stop strings, the end token, min_tokens, max_tokens, and context."""

import pytest

from peagle.core import METHODS, Method
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    ask,
    engine_of,
    pair_of,
    reference_steps,
    serve,
    small,
    small_with_words,
)
from tests.support.models.tiny_models import LEARNED_POSITIONS, make_drafter, make_target


@pytest.mark.parametrize("method", METHODS)
def test_stop_ids(method: Method, prompt) -> None:
    ids = prompt(13)
    answer = tokens_of(reference_steps(small(), "none", ids, max_tokens=24, ignore_eos=True))
    stop = next(token for i, token in enumerate(answer) if i > 3 and token not in answer[:i])
    end = answer.index(stop) + 1
    engine = engine_of(small(), method)
    tokens, pieces = ask(engine, ids, max_tokens=24, stop_ids=frozenset({stop, 500}))
    assert tokens == answer[:end] and pieces[-1].reason == "stop"
    tokens, pieces = ask(engine, ids, max_tokens=end - 1, stop_ids=frozenset({stop}))
    assert tokens == answer[: end - 1] and pieces[-1].reason == "length"
    tokens, _ = ask(engine, ids, max_tokens=24, stop_ids=frozenset({stop}), min_tokens=end + 3)
    assert (
        tokens[: end - 1] == answer[: end - 1]
        and stop not in tokens[: end + 3]
        and len(tokens) >= end + 3
    )


def test_the_end_token_of_the_target(prompt) -> None:
    """Token 1, made likely by a bias, ends an answer unless ignore_eos or min_tokens is set."""
    engine = engine_of(small(), "p-eagle")
    options = {"max_tokens": 12, "temperature": 1.5, "seed": 4, "logit_bias": {1: 9.0}}
    free, pieces = ask(engine, prompt(6), ignore_eos=True, **options)
    assert len(free) == 12 and pieces[-1].reason == "length" and free.count(1) > 1
    tokens, pieces = ask(engine, prompt(6), **options)
    assert tokens == free[: free.index(1) + 1] and pieces[-1].reason == "stop"
    tokens, pieces = ask(engine, prompt(6), min_tokens=8, **options)
    assert 1 not in tokens[:8] and tokens[8:].count(1) <= 1 and len(tokens) >= 8


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings(method: Method, prompt) -> None:
    pair, ids = small_with_words(), prompt(13)
    answer = tokens_of(reference_steps(pair, "none", ids, max_tokens=24))
    text = " ".join(f"w{token}" for token in answer)
    engine = engine_of(pair, method)
    tokens, pieces = ask(engine, ids, max_tokens=24)
    assert tokens == answer and "".join(piece.text for piece in pieces) == text
    for i in range(1, 12):
        stop = f"w{answer[i]} w{answer[i + 1]}"  # It spans two tokens.
        start = text.index(stop)
        end = len(text[: start + len(stop)].split())
        tokens, pieces = ask(engine, ids, max_tokens=24, stop=("nowhere", stop))
        assert (tokens, pieces[-1].reason) == (answer[:end], "stop")
        assert "".join(piece.text for piece in pieces) == text[:start]
    _, pieces = ask(engine, ids, max_tokens=24, stop=(stop,), include_stop=True)
    assert "".join(piece.text for piece in pieces) == text[: start + len(stop)]


@pytest.mark.parametrize("method", METHODS)
def test_the_text_of_a_stop_token_is_left_out(method: Method, prompt) -> None:
    """Its id is part of the answer, as in vLLM; `include_stop` adds its text."""
    pair, ids = small_with_words(), prompt(13)
    answer = tokens_of(reference_steps(pair, "none", ids, max_tokens=24, ignore_eos=True))
    engine = engine_of(pair, method)
    # No word with two digits is a prefix of another one.
    unique_indices = [
        i for i, token in enumerate(answer) if i and token > 9 and token not in answer[:i]
    ]
    assert len(unique_indices) > 3
    for i in unique_indices:
        options = {"max_tokens": 24, "ignore_eos": True, "stop_ids": frozenset({answer[i]})}
        # A stop string that only the stop token would complete has no effect.
        for stop in ((), (f"w{answer[i]}",), (f"w{answer[i - 1]} w{answer[i]}",)):
            for include, end in ((False, i), (True, i + 1)):
                tokens, pieces = ask(engine, ids, stop=stop, include_stop=include, **options)
                text = " ".join(f"w{token}" for token in answer[:end])
                assert (tokens, pieces[-1].reason) == (answer[: i + 1], "stop")
                assert "".join(piece.text for piece in pieces).strip() == text


def test_the_text_of_the_end_token_is_left_out(prompt) -> None:
    pair = small_with_words()  # Token 1 is the word w1, and not special.
    options = {"max_tokens": 12, "temperature": 1.5, "seed": 4, "logit_bias": {1: 9.0}}
    tokens, pieces = ask(engine_of(pair, "p-eagle"), prompt(6), **options)
    assert tokens[-1] == 1 and pieces[-1].reason == "stop"
    assert "".join(piece.text for piece in pieces).split() == [f"w{i}" for i in tokens[:-1]]
    whole = pair.generate(prompt(6), k=3, method="p-eagle", **options)
    assert whole.token_ids == tokens and whole.text.split() == [f"w{i}" for i in tokens[:-1]]


@pytest.mark.parametrize("method", METHODS)
def test_no_stop_string_before_min_tokens(method: Method, prompt) -> None:
    pair, ids = small_with_words(), prompt(13)
    answer = tokens_of(reference_steps(pair, "none", ids, max_tokens=12))
    tokens, pieces = ask(
        engine_of(pair, method), ids, max_tokens=12, min_tokens=6, stop=(f"w{answer[2]}", "w")
    )
    assert tokens == answer[:7] and pieces[-1].reason == "stop"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 244, 250, 253, 254, 255])
def test_answers_fill_the_context(method: Method, length: int, prompt) -> None:
    limit = 300 if length > 1 else 9
    requests = [(prompt(length), {"max_tokens": limit}), (prompt(5), {"max_tokens": 6})]
    answers = serve(engine_of(small(), method, kv_tokens=600, max_batch=2), requests)
    assert answers == [
        reference_steps(small(), method, ids, **settings) for ids, settings in requests
    ]
    assert len(tokens_of(answers[0])) == min(limit, 256 - length)


@pytest.mark.parametrize("name", LEARNED_POSITIONS)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_drafts_beyond_a_table_of_learned_positions(name: str, method: Method, prompt) -> None:
    """The last steps draft past the end of the context, where the target has no positions."""
    target = make_target(name)
    pair = pair_of(target, {method: make_drafter(target, method, 1)})
    settings = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    requests = [(prompt(length), settings) for length in (55, 60, 62, 63)]
    requests.append((prompt(5), {**settings, "max_tokens": 20}))
    shapes = [{"k": 1}, {"k": 7}, {"k": 5, "tree": 12, "exact": False}]
    for shape in shapes[: 3 if method == "p-eagle" else 2]:
        answers = serve(engine_of(pair, method, **shape, kv_tokens=600), requests)
        for steps, (ids, own_settings) in zip(answers, requests, strict=True):
            assert tokens_of(steps) == tokens_of(reference_steps(pair, "none", ids, **own_settings))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options", [{"context": 40}, {"kv_tokens": 40}, {"context": 38, "page_size": 5}]
)
def test_a_smaller_context(method: Method, options: dict[str, int], prompt) -> None:
    """The context is limited by `context` or by the number of pages."""
    engine, ids = engine_of(small(), method, **options), prompt(11)
    room = options.get("context", 40) - 11
    sampled = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    for count in (60, 10**12):  # Memory does not depend on the limit.
        tokens, pieces = ask(engine, ids, max_tokens=count, **sampled)
        assert tokens == tokens_of(
            reference_steps(small(), "none", ids, max_tokens=room, **sampled)
        )
        assert pieces[-1].reason == "length" and len(tokens) == room

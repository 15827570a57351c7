"""Answers with a grammar follow it, with and without drafts, and do not affect other requests."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.core import METHODS, Method
from peagle.engine import Engine
from peagle.engine.stream import RequestRefused
from peagle.errors import UserError
from peagle.grammar import Grammar, GrammarCompiler
from peagle.grammar.compiler import MIN_ENTRY_CHARS
from peagle.grammar.grammar import MAX_GRAMMAR_CHARS
from peagle.grammar.matcher import build_matcher
from peagle.target import Target
from tests.support.engine.decoding import PATTERNS, tokens_of
from tests.support.engine.engines import (
    ask,
    engine_of,
    pair_of,
    plant_drafts,
    serve,
    some_requests,
    steps_of,
)
from tests.support.engine.statistics import p_value
from tests.support.grammars import (
    BOB,
    COMPACT,
    FUZZ_GRAMMARS,
    LATE,
    VOCAB,
    bound_pair,
    spelling_target,
)
from tests.support.models.tiny_models import make_target

SCHEMAS: list[dict[str, Any]] = [
    BOB,
    BOB | {"required": ["age"]},
    {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"enum": [1, 12, "ok"]}]},
        "minItems": 2,
        "maxItems": 6,
    },
    COMPACT
    | {
        "anyOf": [
            {"type": "string", "pattern": "^[a-f]{2,9}$"},
            {"type": "integer", "maximum": 999},
        ]
    },
    COMPACT
    | {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {
            "n": {"type": "array", "items": {"enum": [4, 12, 777]}, "minItems": 4, "maxItems": 8}
        },
    },
]
PATTERN, CHOICES = r"[0-9]{3}-[a-c]{1,4}(ok)?", ["yes", "no", "nobody"]
GRAMMARS = [Grammar.json(schema) for schema in SCHEMAS] + [
    Grammar.regex(PATTERN),
    Grammar.choice(CHOICES),
    Grammar.ebnf('root ::= "[" item ("," item){0,6} "]"\nitem ::= "ab" | "bb" | "12"'),
]


def bound_engine(method: str, k: int | str = 3, **options: Any) -> Engine:
    return engine_of(bound_pair(), method, k, **{"kv_tokens": 1200} | options)


REQUESTS = [
    (ids, {"max_tokens": 100, "grammar": grammar})
    for (ids, _), grammar in zip(some_requests(len(GRAMMARS), seed=2), GRAMMARS, strict=True)
]


@cache
def without_drafts() -> list[list[int]]:
    """Greedy answers of single requests without drafts."""
    engine = bound_engine("none", prefix_caching=False)
    return [ask(engine, ids, **settings)[0] for ids, settings in REQUESTS]


def text_of(tokens: list[int]) -> str:
    return bound_pair().decode(tokens)


def check(grammar: Grammar, text: str) -> None:
    """Check with jsonschema or `re` that the text matches, independently of the engine."""
    number = GRAMMARS.index(grammar)
    if number < len(SCHEMAS):
        jsonschema.validate(json.loads(text), SCHEMAS[number])
    elif grammar.kind == "regex":
        assert re.fullmatch(PATTERN, text)
    elif number == len(GRAMMARS) - 1:
        assert re.fullmatch(r"\[(ab|bb|12)(,(ab|bb|12)){0,6}\]", text)
    else:
        assert text in CHOICES


def test_answers_match_their_grammar() -> None:
    engine = bound_engine("none")
    for ids, settings in REQUESTS:
        tokens, pieces = ask(engine, ids, **settings)
        assert pieces[-1].reason == "stop"
        text = "".join(piece.text for piece in pieces)
        assert text == text_of(tokens)
        check(settings["grammar"], text)
    free = [ask(engine, ids, max_tokens=30)[0] for ids, _ in REQUESTS]
    assert not any(
        tokens[:30] == bound[:30] for tokens, bound in zip(free, without_drafts(), strict=True)
    )


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("k", [3, 7, "auto"])
def test_drafts_do_not_change_answers(method: Method, k: int | str) -> None:
    answers = serve(bound_engine(method, k), REQUESTS)
    assert [tokens_of(steps) for steps in answers] == without_drafts()


def test_accepted_drafts_do_not_change_answers() -> None:
    """Drafts are right, wrong or partly right; rows after accepted drafts are masked as well."""
    engine, turns = bound_engine("p-eagle"), cycle(PATTERNS.values())
    streams = [engine.add(ids, id=str(i), **settings) for i, (ids, settings) in enumerate(REQUESTS)]
    while engine.step():
        plant_drafts(
            engine, {str(i): answer for i, answer in enumerate(without_drafts())}, next(turns)
        )
    answers = [steps_of(stream) for stream in streams]
    assert [tokens_of(steps) for steps in answers] == without_drafts()
    assert {step.accepted for steps in answers for step in steps} == {0, 1, 2, 3}


@pytest.mark.parametrize("exact", [False, True])
def test_pages_run_out(exact: bool) -> None:
    """Preempted requests keep the state of their grammar; exact mode has own passes."""
    requests = [(ids[:8], settings | {"max_tokens": 60}) for ids, settings in REQUESTS]
    plain = bound_engine("none", prefix_caching=False)
    expected = [ask(plain, ids, **settings)[0] for ids, settings in requests]
    engine = bound_engine("p-eagle", kv_tokens=120, exact=exact)
    assert [tokens_of(steps) for steps in serve(engine, requests)] == expected
    assert engine.loop.scheduler.preemptions or exact


@pytest.mark.parametrize("lookahead", [0, 1])
def test_other_requests_are_not_affected(lookahead: int) -> None:
    """With a lookahead, as on a GPU, steps with a grammar are still read back at once."""
    plain = [
        (
            ids,
            {
                "max_tokens": 24,
                "seed": i,
                "temperature": i % 2 * 1.0,
                "ignore_eos": True,
                "logprobs": 2,
            },
        )
        for i, (ids, _) in enumerate(some_requests(8, seed=4))
    ]
    expected_plain = [ask(bound_engine("none"), ids, **settings) for ids, settings in plain]
    mixed = [each for pair in zip(plain, REQUESTS, strict=True) for each in pair]
    engine = bound_engine("p-eagle")
    engine.loop.lookahead = lookahead
    streams = [engine.add(ids, **settings) for ids, settings in mixed]
    engine.drain()
    pieces = [list(stream) for stream in streams]
    answers = [tokens_of([piece.step for piece in each if piece.step]) for each in pieces]
    assert answers[0::2] == [tokens for tokens, _ in expected_plain]
    assert answers[1::2] == without_drafts()
    for (_, before), after in zip(expected_plain, pieces[0::2], strict=True):
        expected, actual = (
            [token.logprob for piece in each for token in piece.logprobs]
            for each in (before, after)
        )
        assert actual == pytest.approx(expected, abs=1e-4)


def test_the_engine_continues_after_an_abort() -> None:
    engine = bound_engine("p-eagle")
    streams = [engine.add(ids, **settings) for ids, settings in REQUESTS[:3]]
    for _ in range(3):
        engine.step()
    streams[1].abort()
    engine.drain()
    engine.check_integrity()
    assert list(streams[1])[-1].reason == "abort"
    assert [tokens_of(steps_of(streams[i])) for i in (0, 2)] == [
        without_drafts()[i] for i in (0, 2)
    ]


# Token 2 is in no grammar, "}" is in some.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 5},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"logit_bias": {2: 100.0, VOCAB.index("}"): -100.0}},
    {"frequency_penalty": 1.5, "presence_penalty": -1.0},
    {"temperature": 1.0, "min_tokens": 12, "stop_ids": frozenset({VOCAB.index("1"), 500})},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_grammars_with_other_options(settings: dict[str, Any]) -> None:
    requests = [
        (ids, options | settings | {"seed": i}) for i, (ids, options) in enumerate(REQUESTS)
    ]
    plain = bound_engine("none", prefix_caching=False)
    expected = [ask(plain, ids, **options) for ids, options in requests]
    # One setting runs with every method, the others with one.
    for method in METHODS[1:] if settings == SETTINGS[0] else ["p-eagle"]:
        answers = serve(bound_engine(method), requests)
        assert [tokens_of(steps) for steps in answers] == [tokens for tokens, _ in expected]
    for (tokens, pieces), (_, options) in zip(expected, requests, strict=True):
        assert 2 not in tokens
        if pieces[-1].reason == "stop" and tokens[-1] != VOCAB.index("1"):
            check(options["grammar"], text_of(tokens))


def test_end_of_answers() -> None:
    """The end token is allowed only at the end of the grammar, and after min_tokens."""
    engine, ids, eos = bound_engine("p-eagle"), [10, 20, 30], {1: 100.0}
    tokens, pieces = ask(engine, ids, grammar=Grammar.regex("a{2,9}"), logit_bias=eos)
    assert (text_of(tokens), tokens[-1], pieces[-1].reason) == ("aa", 1, "stop")
    tokens, pieces = ask(engine, ids, grammar=Grammar.regex("a{2,9}"), logit_bias=eos, min_tokens=5)
    assert (text_of(tokens), len(tokens), pieces[-1].reason) == ("a" * 5, 6, "stop")
    tokens, pieces = ask(engine, ids, grammar=Grammar.regex("a{2,4}"), min_tokens=9)
    assert (text_of(tokens), pieces[-1].reason) == ("aaaa", "stop"), (
        "a complete grammar ends the answer before min_tokens"
    )
    tokens, pieces = ask(engine, ids, grammar=Grammar.regex("abcd"), max_tokens=2)
    assert pieces[-1].reason == "length"
    tokens, pieces = ask(engine, ids, grammar=Grammar.regex("abcdef"), stop=("de",))
    assert ("".join(piece.text for piece in pieces), pieces[-1].reason) == ("abc", "stop")
    tokens, pieces = ask(engine, ids, grammar=Grammar.regex(""))
    assert (tokens, pieces[-1].reason) == ([1], "stop")


def test_logprobs_are_those_of_allowed_tokens() -> None:
    engine = bound_engine("p-eagle")
    _, pieces = ask(engine, [10, 20, 30], grammar=Grammar.choice(["a", "b", "c"]), logprobs=5)
    first = next(token for piece in pieces for token in piece.logprobs)
    assert set(first.top) == {VOCAB.index(letter) for letter in "abc"}
    assert sum(2.718281828**value for value in first.top.values()) == pytest.approx(1, abs=1e-4)
    assert first.logprob == max(first.top.values()) and first.rank == 1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_other_targets(name: str) -> None:
    """The grammars for fuzzing, with fused layers and with those of transformers."""
    pair = pair_of(spelling_target(name))
    requests = [
        (ids, {"max_tokens": 24, "grammar": grammar})
        for (ids, _), grammar in zip(
            some_requests(len(FUZZ_GRAMMARS), seed=5), FUZZ_GRAMMARS, strict=True
        )
    ]
    plain = engine_of(pair, "none", prefix_caching=False)
    expected = [ask(plain, ids, **settings)[0] for ids, settings in requests]
    assert [tokens_of(steps) for steps in serve(engine_of(pair, "none"), requests)] == expected
    assert re.fullmatch("[ab]{2,9}", pair.decode(expected[0]))
    assert pair.decode(expected[2]) in ("yes", "no", "nobody", "name")
    assert json.loads(pair.decode(expected[6]))["a"] in range(100)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_on_cuda(method: Method) -> None:
    """With CUDA graphs, float32 answers equal those of the CPU."""
    engine = engine_of(bound_pair("cuda"), method, kv_tokens=1200)
    engine.warm_up()
    assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == without_drafts()
    assert engine.loop.graphs.enabled


# Sampling: the probability of every answer that matches [ab]{1,3}, by definition.


def outcomes(
    target: Target, ids: list[int], room: int, output: tuple[int, ...] = ()
) -> Iterator[tuple[Any, float]]:
    allowed = [VOCAB.index(token) for token in ("a", "b", "ab", "bb") if len(token) <= room] + [
        1
    ] * bool(output)
    for token, p in probabilities_of(target, [*ids, *output], allowed):
        left = 0 if token == 1 else room - len(VOCAB[token])
        for answer, q in (
            outcomes(target, ids, left, (*output, token)) if left else [((*output, token), 1.0)]
        ):
            yield answer, p * q


def probabilities_of(target: Target, ids: list[int], allowed: list[int]) -> list[tuple[int, float]]:
    # Random weights give extreme probabilities.
    logits = target.forward(torch.tensor(ids)).logits[-1, allowed] / 8
    return list(zip(allowed, logits.double().softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("drafts", ["ab", "bZ"])
def test_sampling_follows_the_masked_distribution(drafts: str) -> None:
    """A chi-square test of 600 answers at level 1e-3, reproducible through fixed seeds."""
    pair, ids, runs = bound_pair(), [12, 30, 44, 9], 600
    pair.target.tap(())
    exact = dict(outcomes(pair.target, ids, 3))
    engine = bound_engine("p-eagle", 2, max_batch=64, kv_tokens=3000)
    options = {"grammar": Grammar.regex("[ab]{1,3}"), "temperature": 8.0, "max_tokens": 4}
    streams = [engine.add(ids, seed=seed, **options) for seed in range(runs)]
    while engine.step():
        engine.loop.stepper.slots.trees.chain[:, :2] = torch.tensor(
            [VOCAB.index(letter) for letter in drafts]
        )
    answers = [steps_of(stream) for stream in streams]
    counts = Counter(tuple(tokens_of(steps)) for steps in answers)
    assert p_value(counts, exact, runs) > 1e-3
    assert sum(step.accepted for steps in answers for step in steps) > 20
    assert len(counts) > 15 and sum(exact.values()) == pytest.approx(1)


# Grammars that cannot be used.


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar.json('{"type": "strin"}'), "strin"),
        (Grammar.json({"not": {"type": "string"}}), "Unimplemented"),
        (Grammar.json("nonsense"), "expected"),
        (Grammar.json('{"anyOf":[' * 2000 + "true" + "]}" * 2000), "recursion"),
        (Grammar.json({"$ref": "#"}), "cannot be used"),
        (Grammar.regex("(a|b"), "unclosed"),
        (Grammar.regex("\ud800"), "surrogates"),
        (Grammar("lark", "start: nobody"), "nobody"),
        (Grammar.ebnf("root ::= ("), "cannot be read"),
        (Grammar.json({"type": "integer", "multipleOf": 10_000_019}), "multipleOf 10000019"),
        (Grammar.json({"const": "<bos>"}), "'<bos>', which is a special token"),
        (Grammar.choice(["<eos>"]), "'<eos>', which is a special token"),
        (
            Grammar.json({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}),
            "items; max is 2000",
        ),
    ],
)
def test_bad_grammars(grammar: Grammar, word: str) -> None:
    engine = bound_engine("none")
    with pytest.raises(UserError, match=word) as error:
        engine.add([10], grammar=grammar)
    assert (
        "\n" not in str(error.value)
        and "<non-verbose/>" not in str(error.value)
        and len(str(error.value)) < 500
    )
    engine.check_integrity()
    assert not engine.loop.states


@pytest.mark.parametrize("method", METHODS)
def test_limits_during_decoding_refuse_the_request(method: Method) -> None:
    engine = bound_engine(method)
    bound, free = (
        engine.add([10, 20], grammar=LATE, max_tokens=200),
        engine.add([10, 30], max_tokens=40),
    )
    engine.drain()
    with pytest.raises(
        RequestRefused, match="cannot follow its grammar: Parser Error: Current row"
    ) as error:
        list(bound)
    assert "\n" not in str(error.value) and "<non-verbose/>" not in str(error.value)
    assert list(free)[-1].reason in ("stop", "length")
    assert engine.status()["finished"]["refused"] == 1 and not engine.status()["finished"].get(
        "error"
    )
    engine.check_integrity()


def test_ambiguous_grammars_are_refused() -> None:
    """The vocabulary is small, so the limit is lower than for a real one."""
    compiler = GrammarCompiler(bound_pair().target, max_parser_items=50)
    with pytest.raises(UserError, match=r"Too many items \(limit 50;"):
        compiler.compile(Grammar("lark", "start: s\ns: s s s | s s | /[a-z]/ | "))


def test_the_cache_of_compiled_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(bound_pair().target, cache_chars=3 * MIN_ENTRY_CHARS)
    compiled: list[str] = []

    def record(tokenizer: Any, grammar: Grammar, *limits: Any) -> Any:
        compiled.append(grammar.text)
        return build_matcher(tokenizer, grammar, *limits)

    monkeypatch.setattr("peagle.grammar.compiler.build_matcher", record)
    for text in ("a", "b", "c", "a", "d", "a", "b"):
        compiler.compile(Grammar.regex(text))
    assert compiled == ["a", "b", "c", "d", "b"], "the least recently used grammar must be evicted"
    compiler.compile(Grammar.regex("e" * (2 * MIN_ENTRY_CHARS)))
    compiler.compile(Grammar.regex("b"))
    compiler.compile(Grammar.regex("a"))
    assert compiled[5:] == ["e" * (2 * MIN_ENTRY_CHARS), "a"], (
        "long grammars must use more of the cache"
    )


def test_invalid_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bound_engine("none")
    with pytest.raises(UserError, match="ignore_eos"):
        engine.add([10], grammar=Grammar.json(), ignore_eos=True)
    with pytest.raises(UserError, match="smaller"):
        Grammar.regex("a" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(UserError, match="smaller"):
        Grammar.ebnf("a" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(UserError, match="allows nothing"):
        Grammar.json(False)
    for texts in ([], ["a", ""]):
        with pytest.raises(UserError, match="choice"):
            Grammar.choice(texts)
    with pytest.raises(UserError, match="tokenizer"):
        engine_of(pair_of(make_target()), "none").add([10], grammar=Grammar.json())
    monkeypatch.setattr("peagle.grammar.matcher.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'peagle\[serve\]'"):
        engine_of(pair_of(make_target()), "none").add([10], grammar=Grammar.json())


def test_any_text_can_be_a_choice() -> None:
    texts = [
        *(f"item{i}" for i in range(5000)),
        "a b",
        "é",
        "😀 x",
        'q"uo\\te',
        "new\nline",
        "it's",
        "/x/",
        "tab\t",
    ]
    model = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    model.pre_tokenizer, model.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    model.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    target = SimpleNamespace(tokenizer=tokenizer, vocab_size=257, stop_ids={256}, name="bytes")
    compiled = GrammarCompiler(target).compile(Grammar.choice(texts))  # type: ignore[arg-type]
    for text in texts[-12:]:
        copy = compiled.new_matcher()
        assert copy.consume_tokens(tokenizer(text)["input_ids"]) and copy.is_stopped()

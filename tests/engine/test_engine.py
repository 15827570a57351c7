"""The engine is lossless: many requests at once, and each gets what it would get alone, step by step."""

import random
import tempfile
from functools import cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.catalog.pair import Pair, TargetSource
from peagle.core import METHODS, Method, Sampling, Step
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.engine import Engine
from peagle.engine.kv.page_allocator import ROOT, PageAllocator
from peagle.engine.stream import Stream, StreamPiece
from peagle.loaded import LoadedPair
from peagle.reference.decode import decode
from peagle.reference.proposer import proposer_for
from peagle.target import Target
from tests.reference.test_decode import PATTERNS, tokens_of, transformers_generate
from tests.support.tiny_models import make_drafter, make_target
from tests.support.training import make_run, some_config, train, write_answers

K = 3
Asked = tuple[list[int], dict[str, Any]]  # a prompt, and what Engine.add takes besides
TIGHT = {"max_batch": 5, "page": 4, "chunk": 16, "tokens": 100}  # chunks are cut, pages run out


def pair_of(target: Target, drafters: dict[Method, Drafter] | None = None) -> LoadedPair:
    return LoadedPair(Pair(target.name, TargetSource(()), {}, k=K), target, drafters)


@cache
def small() -> LoadedPair:
    """A target of three layers and drafters that have learned from its answers; once per process."""
    target, folder, drafters = (
        make_target(seed=7, num_hidden_layers=3),
        Path(tempfile.mkdtemp()),
        dict[Method, Drafter](),
    )
    data = write_answers(target, folder / "answers.jsonl", count=40, tokens=40)
    for method in METHODS[1:]:
        how = {
            "method": method,
            "steps": 45,
            "lr": 1e-2,
            "save_every": 0,
            "init": "target",
            "aux_layer_ids": (0, 1, 2),
        }
        train(make_run(target, some_config(data, folder / method, **how)))
        drafters[method] = checkpoint.load(folder / method / "drafter", target, torch.float32)
    return pair_of(target, drafters)


def words() -> PreTrainedTokenizerFast:
    """Token 17 is the word w17."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def small_with_words() -> LoadedPair:
    return pair_of(Target(small().target.model, words(), "tiny"), small()._drafters)


def engine_of(pair: LoadedPair, method: str, k: int | str = K, **how: Any) -> Engine:
    return Engine(pair, method=method, k=k, thread=False, **TIGHT | how)


def some_requests(count: int, seed: int, **settings: Any) -> list[Asked]:
    """Short and long ones; many begin alike."""
    chance = random.Random(seed)
    common = [chance.randrange(6, 96) for _ in range(30)]
    asked: list[Asked] = []
    for _ in range(count):
        own = [chance.randrange(6, 96) for _ in range(chance.randint(1, 12))]
        asked.append((common[: chance.choice([0, 0, 9, 16, 30])] + own, settings))
    return asked


def alone(
    pair: LoadedPair, method: Method, ids: list[int], k: int = K, max_tokens: int = 128, **how: Any
) -> list[Step]:
    """The reference: one request, by the plain loop."""
    drafter = None if method == "none" else pair.drafter(method)
    pair.target.tap(drafter.config.aux_layer_ids or () if drafter else ())
    proposer = proposer_for(drafter) if drafter else None
    stops = frozenset() if how.pop("ignore_eos", False) else pair.target.stop_ids
    return list(
        decode(pair.target, proposer, ids, k if drafter else 0, max_tokens, Sampling(**how), stops)
    )


def steps_of(stream: Stream) -> list[Step]:
    return [piece.step for piece in stream if piece.step]


def serve(
    engine: Engine, asked: list[Asked], pauses: tuple[int, ...] = (0, 1, 2)
) -> list[list[Step]]:
    """Some come while others run, so many steps later."""
    chance, streams = random.Random(0), []
    for ids, settings in asked:
        streams.append(engine.add(ids, **settings))
        for _ in range(chance.choice(pauses)):
            engine.step()
            engine.check_integrity()
    engine.drain()
    engine.check_integrity()
    assert not engine.seats and engine.pages.free == engine.pages.count
    return [steps_of(stream) for stream in streams]


def ask(engine: Engine, ids: list[int], **settings: Any) -> tuple[list[int], list[StreamPiece]]:
    """One request's tokens, and all of its pieces."""
    stream = engine.add(ids, **settings)
    engine.drain()
    engine.check_integrity()
    pieces = list(stream)
    return tokens_of([piece.step for piece in pieces if piece.step]), pieces


# Every architecture.


@pytest.fixture(scope="module")
def any_pair(any_target: Target) -> LoadedPair:
    drafters = {
        "p-eagle": make_drafter(any_target, "p-eagle", 2),
        "eagle3": make_drafter(any_target, "eagle3", 1),
    }
    return pair_of(any_target, drafters)


COUNT = 8  # tokens of an answer
ASKED = some_requests(8, seed=3, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def generated(any_target: Target) -> list[list[int]]:
    return [transformers_generate(any_target, ids, COUNT) for ids, _ in ASKED]


@pytest.mark.parametrize("method", METHODS)
def test_equals_transformers_and_the_plain_loop(
    any_pair: LoadedPair, generated, method: Method
) -> None:
    engine = engine_of(any_pair, method)
    answers = serve(engine, ASKED)
    assert [tokens_of(steps) for steps in answers] == generated
    assert (
        engine.scheduler.preemptions
        and engine.pages.found
        and engine.metrics.prefill_passes > len(ASKED)
    )
    if method != "none":
        assert answers == [alone(any_pair, method, ids, **settings) for ids, settings in ASKED]


def whisper(engine: Engine, answers: dict[str, list[int]], right: list[bool]) -> None:
    """Drafts that are right or wrong as the pattern says, in place of the drafter's own."""
    for id, seat in engine.seats.items():
        if seat.place is not None:
            said = len(engine.scheduler.live[id].output)
            truth = (answers[id][said:] + [3] * K)[:K]
            drafts = [
                token if ok else (token + 1) % 96
                for token, ok in zip(truth, islice(cycle(right), K), strict=True)
            ]
            engine.stepper.places.trees.chain[seat.place, :K] = torch.tensor(drafts)


def test_whatever_is_accepted(any_pair: LoadedPair, generated) -> None:
    engine, turns = engine_of(any_pair, "p-eagle"), cycle(PATTERNS.values())
    streams = [engine.add(ids, id=str(i), **settings) for i, (ids, settings) in enumerate(ASKED)]
    while engine.step():
        whisper(engine, {str(i): answer for i, answer in enumerate(generated)}, next(turns))
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
    engine = engine_of(small(), method, max_batch=64, tokens=1600, chunk=256)
    answers = serve(engine, asked, pauses=(0,) * 9 + (1,))
    assert answers == [alone(small(), method, ids, **settings) for ids, settings in asked]
    assert engine.metrics.acceptance_length > 1.5
    assert engine.metrics.drafts > 15 * engine.metrics.steps, "of a pass, in the mean"
    assert engine.scheduler.preemptions and engine.pages.found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 6, "auto"])
def test_any_k_gives_the_same_tokens(method: Method, k: int | str) -> None:
    asked = some_requests(8, seed=5, max_tokens=14)
    engine = engine_of(small(), method, k, prefix_caching=False)
    expected = [tokens_of(alone(small(), "none", ids, **settings)) for ids, settings in asked]
    assert [tokens_of(steps) for steps in serve(engine, asked)] == expected
    assert engine.pages.found == 0


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.2, "min_p": 0.1, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -100.0, 1: 3.0}},
    {"temperature": 1.3, "logit_bias": {1: 6.0}, "min_tokens": 9},  # would end at once
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 1.0, "logit_bias": {20: 5.0}},
    {"min_tokens": 8, "logit_bias": {1: 50.0}, "stop_ids": frozenset({40, 41})},
    {},
]
MIXED = [
    (ids, {"max_tokens": 14, "seed": i, **SETTINGS[i % len(SETTINGS)]})
    for i, (ids, _) in enumerate(some_requests(18, seed=8))
]


@cache
def one_by_one() -> list[list[int]]:
    """What each of the mixed requests gets alone, without speculation."""
    engine = engine_of(small(), "none", prefix_caching=False)
    return [ask(engine, ids, **settings)[0] for ids, settings in MIXED]


@pytest.mark.parametrize(
    ("method", "k"), [("none", 1), ("p-eagle", 3), ("p-eagle", "auto"), ("eagle3", 2)]
)
def test_a_seed_gives_the_same_answer_beside_anybody(method: Method, k: int | str) -> None:
    asked = list(enumerate(MIXED))
    random.Random(k).shuffle(asked)
    engine = engine_of(small(), method, k)
    answers = serve(engine, [each for _, each in asked])
    assert [tokens_of(steps) for steps in answers] == [one_by_one()[i] for i, _ in asked]
    assert engine.scheduler.preemptions


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
    engine = engine_of(small(), method, tokens=400)
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


def without_the_next_token(
    self: PageAllocator, tokens: list[int], first: int = 0, key: bytes = ROOT
) -> Any:
    for begin in range(first * self.size, len(tokens) - self.size, self.size):
        key += bytes(tokens[begin : begin + self.size])
        yield key


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "by its own tokens alone"])
def test_a_page_is_shared_with_its_next_token_only(
    monkeypatch, method: Method, broken: bool, prompt
) -> None:
    """The drafter's last row of a page reads the token after it: prompts that differ there share one page less."""
    if broken:  # the test can tell
        monkeypatch.setattr(PageAllocator, "_chain", without_the_next_token)
    shared, apart = prompt(24), 0
    engine = engine_of(small(), method, chunk=32, tokens=800)
    for tail in range(10, 16):
        held = []
        for one in (engine, engine_of(small(), method, chunk=32)):
            stream = one.add([*shared, tail, 3], max_tokens=8)
            one.step()
            held.append(computed(one, stream.id))
            one.drain()
            assert broken or steps_of(stream) == alone(
                small(), method, [*shared, tail, 3], max_tokens=8
            )
        apart += any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(*held, strict=True))
    assert apart == (5 if broken else 0)
    assert engine.metrics.cached_tokens == 5 * (24 if broken else 20)


def computed(engine: Engine, id: str) -> list[torch.Tensor]:
    """The keys and values of a request's positions, of every layer of target and drafter."""
    request, size, memory = engine.scheduler.live[id], engine.pages.size, engine.stepper.memory
    at = torch.tensor([request.pages[j // size] * size + j % size for j in range(request.computed)])
    return [cache[at] for cache in (*memory.keys, *memory.values)]


# What is told besides.


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_targets_own(method: Method) -> None:
    wanted = [0, 1, 5, 20, None]
    asked = [
        (
            ids,
            {
                "max_tokens": 10,
                "logprobs": wanted[i % 5],
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
        told = list(chain(*(piece.logprobs for piece in pieces)))
        assert [each.token for each in told] == ([] if top is None else tokens)
        rows = (
            small()
            .target.forward(torch.tensor(ids + tokens))
            .logits[len(ids) - 1 : -1]
            .log_softmax(-1)
        )
        for each, row in zip(told, rows, strict=False):
            assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
            assert each.rank == int((row > row[each.token]).sum()) + 1
            best = row.topk(top or 0)
            assert each.top == pytest.approx(
                dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-4
            )


def test_counters_add_up() -> None:
    engine, asked = engine_of(small(), "p-eagle"), some_requests(12, seed=6, max_tokens=12)
    answers = serve(engine, asked)
    steps, told = list(chain(*answers)), engine.status()
    assert told["generated_tokens"] == sum(len(step.tokens) for step in steps)
    assert told["prompt_tokens"] == sum(len(ids) for ids, _ in asked)
    assert told["drafts"] == sum(step.drafted > 0 for step in steps)
    assert told["draft_tokens"] == sum(step.drafted for step in steps)
    assert (
        told["accepted_tokens"] == sum(step.accepted for step in steps) == sum(told["accepted_at"])
    )
    assert told["finished"].keys() <= {"stop", "length"} and sum(told["finished"].values()) == 12
    assert (told["waiting"], told["running"], told["kv_usage"]) == (0, 0, 0)
    assert told["k_steps"] == {K: told["steps"]} and told["k_reason"] == "fixed"


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

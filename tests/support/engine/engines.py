"""Small engines, requests for them, and their expected answers."""

import random
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.catalog.pair import Pair, TargetSource
from peagle.core import DRAFTER_METHODS, Method, Sampling, Step
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.engine import Engine, EngineConfig
from peagle.engine.stream import Stream, StreamPiece
from peagle.loaded import LoadedPair
from peagle.reference.decode import decode
from peagle.reference.ngram import NgramProposer
from peagle.reference.proposer import Proposer, proposer_for
from peagle.target import Target
from tests.support.built_once import built_once
from tests.support.engine.decoding import tokens_of
from tests.support.models.tiny_models import make_target
from tests.support.train.training import make_run, some_config, train, write_answers

K = 3
EngineRequest = tuple[list[int], dict[str, Any]]  # The prompt and other options of Engine.add.
# Prompts are cut into chunks, and pages run out.
TIGHT = {"max_batch": 5, "page_size": 4, "prefill_chunk": 16, "kv_tokens": 100}


def pair_of(target: Target, drafters: dict[Method, Drafter] | None = None) -> LoadedPair:
    return LoadedPair(Pair(target.name or "tiny", TargetSource(()), {}, k=K), target, drafters)


@cache
def small() -> LoadedPair:
    """A target of three layers, with drafters trained on its answers."""
    target = make_target(seed=7, num_hidden_layers=3)
    folder = built_once("small", lambda folder: _train_drafters(target, folder))
    drafters: dict[Method, Drafter] = {
        method: checkpoint.load(folder / method / "drafter", target, torch.float32)
        for method in DRAFTER_METHODS
    }
    return pair_of(target, drafters)


def _train_drafters(target: Target, folder: Path) -> None:
    data = write_answers(target, folder / "answers.jsonl", count=40, tokens=40)
    for method in DRAFTER_METHODS:
        options = {
            "method": method,
            "steps": 45,
            "lr": 1e-2,
            "save_every": 0,
            "init": "target",
            "aux_layer_ids": (0, 1, 2),
        }
        train(make_run(target, some_config(data, folder / method, **options)))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word tokenizer, in which token 17 is w17."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def small_with_words() -> LoadedPair:
    return pair_of(Target(small().target.model, word_tokenizer(), "tiny"), small()._drafters)


def engine_of(pair: LoadedPair, method: str, k: int | str = K, **options: Any) -> Engine:
    return Engine(pair, EngineConfig(method=method, k=k, thread=False, **TIGHT | options))


def some_requests(count: int, seed: int, **settings: Any) -> list[EngineRequest]:
    """Short and long prompts, many with a common prefix, and the same settings for all."""
    rng = random.Random(seed)
    common = [rng.randrange(6, 96) for _ in range(30)]
    requests: list[EngineRequest] = []
    for _ in range(count):
        own = [rng.randrange(6, 96) for _ in range(rng.randint(1, 12))]
        requests.append((common[: rng.choice([0, 0, 9, 16, 30])] + own, settings))
    return requests


def reference_steps(
    pair: LoadedPair,
    method: Method,
    ids: list[int],
    k: int = K,
    max_tokens: int = 128,
    **options: Any,
) -> list[Step]:
    """The expected steps: one request in the plain decoding loop."""
    drafter = pair.drafter(method) if method in DRAFTER_METHODS else None
    pair.target.tap(drafter.config.aux_layer_ids or () if drafter else ())
    proposer: Proposer | None = proposer_for(drafter) if drafter else None
    if method == "ngram":
        proposer = NgramProposer()
    stops = frozenset() if options.pop("ignore_eos", False) else pair.target.stop_ids
    return list(
        decode(
            pair.target, proposer, ids, k if proposer else 0, max_tokens, Sampling(**options), stops
        )
    )


def steps_of(stream: Stream) -> list[Step]:
    return [piece.step for piece in stream if piece.step]


def serve(
    engine: Engine, requests: list[EngineRequest], pauses: tuple[int, ...] = (0, 1, 2)
) -> list[list[Step]]:
    """Add requests while others run, with pauses of so many steps, and return their steps."""
    rng, streams = random.Random(0), []
    for ids, settings in requests:
        streams.append(engine.add(ids, **settings))
        for _ in range(rng.choice(pauses)):
            engine.step()
            engine.check_integrity()
    engine.drain()
    engine.check_integrity()
    assert not engine.loop.states and engine.idle
    return [steps_of(stream) for stream in streams]


def ask(engine: Engine, ids: list[int], **settings: Any) -> tuple[list[int], list[StreamPiece]]:
    """Run one request; return its tokens and all of its pieces."""
    stream = engine.add(ids, **settings)
    engine.drain()
    engine.check_integrity()
    pieces = list(stream)
    return tokens_of([piece.step for piece in pieces if piece.step]), pieces


COUNT = 8  # tokens of an answer
REQUESTS = some_requests(8, seed=3, max_tokens=COUNT, ignore_eos=True)


def plant_drafts(engine: Engine, answers: dict[str, list[int]], right: list[bool]) -> None:
    """Replace the drafts by ones that are right or wrong, as the pattern `right` says."""
    for id, state in engine.loop.states.items():
        if state.slot is not None:
            emitted = len(engine.loop.scheduler.live[id].output)
            expected = (answers[id][emitted:] + [3] * K)[:K]
            drafts = [
                token if ok else (token + 1) % 96
                for token, ok in zip(expected, islice(cycle(right), K), strict=True)
            ]
            engine.loop.stepper.slots.trees.chain[state.slot, :K] = torch.tensor(drafts)


# Without min_tokens, it would end at once.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.2, "min_p": 0.1, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -100.0, 1: 3.0}},
    {
        "temperature": 1.3,
        "logit_bias": {1: 6.0},
        "min_tokens": 9,
    },
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
    """The answers to MIXED, one request at a time and without speculation."""
    engine = engine_of(small(), "none", prefix_caching=False)
    return [ask(engine, ids, **settings)[0] for ids, settings in MIXED]

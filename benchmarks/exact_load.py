"""Exact mode under load: answers equal to those of `none` alone, and the price of that.

    python -m benchmarks.exact_load OUT [--data DATA] [--pair smollm2-135m] [--shape llama-3.1-8b]
        [--seconds 400] [--tasks 64] [--tokens 256] [--batch 64] [--alone 24] [--parts equal,price]
        [--draftings none,"p-eagle K=7"] [--no-fast]

`equal`: prompts of humaneval and gsm8k, greedy and sampled with seeds, arriving one after another,
with a prefix cache and with pages for half of the requests, for K = 7, K = 11, a tree of 31 nodes
and adaptive drafting; every load twice. `shape`: a target with random weights, which has many near
ties. `price`: tokens per second of the fast mode and of exact mode at 1, 8 and 64 requests, and
milliseconds per step: the answers of both modes differ, and so do their acceptance lengths.
Results are printed as they come and written to OUT/exact_load.json.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.part_report import PartReport
from peagle.bench.random_models import random_pair
from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.engine.stream import Stream
from peagle.loaded import LoadedPair, load

SETS = ("humaneval", "gsm8k")
CONTEXT = 1024
SHAPE_PROMPT = 128
ACCEPTANCE = [0.78, 0.76, 0.73, 0.67, 0.62, 0.56, 0.5]  # of drafts that are forced
LOADS = (1, 8, 64)


@dataclass(frozen=True)
class Drafting:
    """What an engine drafts."""

    method: str
    k: int | str = 1
    tree: int = 0

    @property
    def name(self) -> str:
        if self.method == "none":
            return "none"
        return f"{self.method} K={self.k}" + (f" tree {self.tree}" if self.tree else "")


NONE = Drafting("none")
DRAFTINGS = (
    NONE,
    Drafting("p-eagle", 7),
    Drafting("p-eagle", 11),
    Drafting("p-eagle", 11, 31),
    Drafting("p-eagle", "auto", 31),
)


@dataclass(frozen=True)
class Asked:
    ids: list[int]
    options: dict[str, Any]


def engine_of(pair: LoadedPair, drafting: Drafting, exact: bool, **options: Any) -> Engine:
    config: dict[str, Any] = {"max_batch": 64, "context": CONTEXT, "thread": False} | options
    return Engine(
        pair,
        EngineConfig(
            method=drafting.method, k=drafting.k, tree=drafting.tree, exact=exact, **config
        ),
    )


def tokens_of(stream: Stream) -> list[int]:
    return [token for piece in stream if piece.step for token in piece.step.tokens]


def answer(engine: Engine, asked: list[Asked], concurrency: int) -> tuple[list[list[int]], float]:
    """Keep so many requests in the engine; a new one comes at every other step at most."""
    waiting = list(reversed(asked))
    streams: list[Stream] = []
    started = time.perf_counter()
    while waiting or engine.busy:
        if waiting and engine.live_requests < concurrency:
            request = waiting.pop()
            streams.append(engine.add(request.ids, **request.options))
        engine.step()
        if engine.live_requests < concurrency // 2:
            continue
        engine.step()
    seconds = time.perf_counter() - started
    return [tokens_of(stream) for stream in streams], seconds


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    length: float  # tokens per step of a request
    step_ms: float  # of all requests together

    @classmethod
    def of(cls, streams: list[Stream], seconds: float, concurrency: int) -> "Speed":
        counts = [len(piece.step.tokens) for s in streams for piece in s if piece.step]
        steps = max(len(counts), 1)
        return cls(sum(counts) / seconds, sum(counts) / steps, 1000 * seconds * concurrency / steps)


def measure(engine: Engine, asked: list[Asked], concurrency: int) -> Speed:
    """With always so many requests."""
    waiting = list(reversed(asked))
    streams: list[Stream] = []
    started = time.perf_counter()
    while waiting or engine.busy:
        while waiting and engine.live_requests < concurrency:
            request = waiting.pop()
            streams.append(engine.add(request.ids, **request.options))
        engine.step()
    return Speed.of(streams, time.perf_counter() - started, concurrency)


def real_requests(pair: LoadedPair, options: argparse.Namespace) -> list[Asked]:
    """Every prompt once greedy and once sampled with a seed."""
    sets = read_sets(list(SETS), options.data, options.tasks)
    texts = [task.turns[0] for tasks in sets.values() for task in tasks]
    prompts = [pair.encode([{"role": "user", "content": text}]) for text in texts]
    limits = {"max_tokens": options.tokens, "ignore_eos": True}
    fitting = [ids for ids in prompts if len(ids) + options.tokens < CONTEXT - 64]
    greedy = [Asked(list(ids), limits) for ids in fitting]
    sampled = [
        Asked(list(ids), limits | {"temperature": 0.8, "top_p": 0.95, "seed": i})
        for i, ids in enumerate(fitting)
    ]
    return greedy + sampled


def plain_answers(
    report: PartReport, pair: LoadedPair, asked: list[Asked], options: argparse.Namespace
) -> list[list[int]]:
    """The answers of `none` alone.

    With `--alone N`, N of them are; the others come from batches, which must give the same N.
    """
    sample = list(range(len(asked)))
    if options.alone:
        random.Random(2).shuffle(sample)
        sample = sample[: options.alone]
    engine = engine_of(pair, NONE, True, max_batch=1, prefix_caching=False)
    report.add(part="equal", requests=len(asked), exact=engine.exact_mode, status=kernels(engine))
    alone, seconds = answer(engine, [asked[i] for i in sample], 1)
    engine.close()
    report.add(alone=len(alone), seconds=round(seconds, 1))
    if not options.alone:
        return alone
    engine = engine_of(pair, NONE, True, max_batch=options.batch, prefix_caching=False)
    expected, seconds = answer(engine, asked, options.batch)
    engine.close()
    same = sum(expected[i] == tokens for i, tokens in zip(sample, alone, strict=True))
    report.add(batched_as_alone=f"{same} of {len(sample)}", seconds=round(seconds, 1))
    for i, tokens in zip(sample, alone, strict=True):
        expected[i] = tokens
    return expected


def kernels(engine: Engine) -> str:
    return str(engine.status()["kernels"])


def chosen_draftings(draftings: Sequence[Drafting], options: argparse.Namespace) -> list[Drafting]:
    names = options.draftings.split(",")
    return [x for x in draftings if not options.draftings or x.name in names]


def equal_part(report: PartReport, pair: LoadedPair, options: argparse.Namespace) -> None:
    asked = real_requests(pair, options)
    expected = plain_answers(report, pair, asked, options)
    order = list(range(len(asked)))
    random.Random(0).shuffle(order)
    longest = max(len(request.ids) for request in asked) + options.tokens
    half = (options.batch // 2) * longest
    for drafting in chosen_draftings(DRAFTINGS, options):
        for exact in (True, False):
            if not report.has_time:
                return
            if not exact and (options.no_fast or drafting not in (NONE, DRAFTINGS[-1])):
                continue
            engine = engine_of(pair, drafting, exact, max_batch=options.batch, kv_tokens=half)
            runs = [answer(engine, [asked[i] for i in order], options.batch) for _ in range(2)]
            same = [
                [a == expected[i] for a, i in zip(answers, order, strict=True)]
                for answers, _ in runs
            ]
            middle = len(asked) // 2
            status = engine.status()
            report.add(
                drafting=drafting.name,
                exact=engine.exact_mode,
                greedy=f"{sum(s for s, i in zip(same[0], order, strict=True) if i < middle)}"
                f" of {middle}",
                sampled=f"{sum(s for s, i in zip(same[0], order, strict=True) if i >= middle)}"
                f" of {len(asked) - middle}",
                runs_equal=runs[0][0] == runs[1][0],
                second_run=sum(same[1]),
                preemptions=status["preemptions"],
                prefix_hits=status["prefix_hits"],
                seconds=round(runs[1][1], 1),
            )
            engine.close()


def shape_part(report: PartReport, pair: LoadedPair, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    high = pair.target.vocab_size - 1
    asked = [
        Asked(
            torch.randint(0, high, (SHAPE_PROMPT,), generator=generator).tolist(),
            {"max_tokens": options.shape_tokens, "ignore_eos": True},
        )
        for _ in range(options.batch)
    ]
    plain = engine_of(pair, NONE, True, max_batch=1, kv_tokens=CONTEXT)
    report.add(part="shape", shape=options.shape, exact=plain.exact_mode)
    expected, seconds = answer(plain, asked, 1)
    plain.close()
    report.add(alone=len(expected), seconds=round(seconds, 1))
    for drafting in (NONE, Drafting("p-eagle", 7), Drafting("p-eagle", 11, 31)):
        for exact in (True, False):
            if not report.has_time:
                return
            engine = engine_of(pair, drafting, exact, max_batch=options.batch)
            answers, seconds = answer(engine, asked, options.batch)
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            report.add(
                shape=options.shape,
                drafting=drafting.name,
                exact=engine.exact_mode,
                equal=f"{same} of {len(asked)}",
                seconds=round(seconds, 1),
            )
            engine.close()


def price_part(
    report: PartReport, name: str, pair: LoadedPair, options: argparse.Namespace, forced: bool
) -> None:
    """`forced`: random drafts are accepted as those of a trained drafter would be."""
    if forced:
        generator = torch.Generator().manual_seed(1)
        high = pair.target.vocab_size - 1
        limits = {"max_tokens": options.shape_tokens, "ignore_eos": True}
        prompts = torch.randint(0, high, (128, SHAPE_PROMPT), generator=generator).tolist()
        asked = [Asked(ids, limits) for ids in prompts]
        draftings: tuple[Drafting, ...] = (NONE, Drafting("p-eagle", 7))
    else:
        greedy = real_requests(pair, options)
        asked = greedy[: len(greedy) // 2]
        random.Random(1).shuffle(asked)
        draftings = (NONE, Drafting("p-eagle", 7), *reversed(DRAFTINGS[-2:]))
    for drafting in chosen_draftings(draftings, options):
        speeds: dict[tuple[bool, int], Speed] = {}
        for exact in (False, True):
            if not report.has_time:
                return
            engine = engine_of(pair, drafting, exact)
            if forced and drafting != NONE:
                engine.force_acceptance(ACCEPTANCE)  # before CUDA graphs are captured
            engine.warm_up()
            measure(engine, asked[:8], 8)
            # Forced acceptance lengths hardly vary; real ones differ between the modes' answers.
            counts = {1: 8 if forced else 32, 8: 32, 64: 128}
            for load_size in LOADS:
                repeated = [asked[i % len(asked)] for i in range(counts[load_size])]
                runs = [measure(engine, repeated, load_size) for _ in range(2)]
                speeds[exact, load_size] = max(runs, key=lambda run: run.tokens_per_second)
            modes = engine.status()["k_reason"]
            engine.close()
        report.add(
            price=name,
            drafting=drafting.name,
            fast=[round(speeds[False, size].tokens_per_second) for size in LOADS],
            exact=[round(speeds[True, size].tokens_per_second) for size in LOADS],
            percent=[price(speeds, size, "tokens_per_second") for size in LOADS],
            step_percent=[-price(speeds, size, "step_ms") for size in LOADS],
            fast_length=[round(speeds[False, size].length, 2) for size in LOADS],
            exact_length=[round(speeds[True, size].length, 2) for size in LOADS],
            last_choice=modes,
        )


def price(speeds: dict[tuple[bool, int], Speed], load_size: int, name: str) -> float:
    """The percentage by which a figure of exact mode is smaller."""
    fast, exact = (getattr(speeds[mode, load_size], name) for mode in (False, True))
    return round(100 * (1 - exact / fast), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--alone", type=int, default=0, help="requests alone; 0: all")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shape-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draftings", default="", help="of `equal` and `price`; default: all")
    parser.add_argument("--no-fast", action="store_true", help="`equal` of exact mode only")
    parser.add_argument("--parts", default="equal,price,shape,shape price")
    options = parser.parse_args()
    report = PartReport(options.out / "exact_load.json", options.seconds)
    parts = options.parts.split(",")
    if {"equal", "price"} & set(parts):
        pair = load(options.pair, device=options.device, dtype=options.dtype)
        if "equal" in parts:
            report.run("equal", lambda: equal_part(report, pair, options))
        if "price" in parts:
            report.run("price", lambda: price_part(report, options.pair, pair, options, False))
        del pair
    if {"shape", "shape price"} & set(parts) and report.has_time:
        shaped = random_pair(options.shape, options.device, getattr(torch, options.dtype))
        if "shape" in parts:
            report.run("shape", lambda: shape_part(report, shaped, options))
        if "shape price" in parts:
            report.run(
                "shape price", lambda: price_part(report, options.shape, shaped, options, True)
            )
    print("\n== table")
    for record in report.records:
        print(record)


if __name__ == "__main__":
    main()

"""Exact mode under load: answers equal to those of `none` alone, and the price of that.

    python -m benchmarks.exact.load OUT [--data DATA] [--pair smollm2-135m] [--shape llama-3.1-8b]
        [--seconds 400] [--tasks 64] [--tokens 256] [--batch 64] [--alone 24] [--parts equal,price]
        [--draftings none,"p-eagle K=7"] [--no-fast] [--repeats 5] [--acceptance natural,forced]

`equal`: prompts of humaneval and gsm8k, greedy and sampled with seeds, arriving one after another,
with a prefix cache and with pages for half of the requests, for K = 7, K = 11, a tree of 31 nodes
and adaptive drafting; every load twice. `shape`: a target with random weights, which has many near
ties. `price`: tokens per second and milliseconds of a step of both modes at 1, 8 and 64 requests,
in turn, with the acceptance of the pair and with a forced one (price.py); `shape price`: the
same for random weights, forced.
Results are printed as they come and written to OUT/exact_load.json.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.exact.engines import (
    CONTEXT,
    DRAFTINGS,
    NONE,
    SHAPE_PROMPT,
    Asked,
    Drafting,
    engine_of,
)
from benchmarks.exact.part_report import PartReport
from benchmarks.exact.price import PriceLoad, measure_price
from peagle.bench.random_models import random_pair
from peagle.data.bench import read_sets
from peagle.engine import Engine
from peagle.engine.stream import Stream
from peagle.loaded import LoadedPair, load

SETS = ("humaneval", "gsm8k")


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


def real_requests(pair: LoadedPair, options: argparse.Namespace, tokens: int) -> list[Asked]:
    """Every prompt once greedy and once sampled with a seed; `tokens`: of an answer."""
    sets = read_sets(list(SETS), options.data, options.tasks)
    texts = [task.turns[0] for tasks in sets.values() for task in tasks]
    prompts = [pair.encode([{"role": "user", "content": text}]) for text in texts]
    limits = {"max_tokens": tokens, "ignore_eos": True}
    fitting = [ids for ids in prompts if len(ids) + tokens < CONTEXT - 64]
    greedy = [Asked(list(ids), limits) for ids in fitting]
    sampled = [
        Asked(list(ids), limits | {"temperature": 0.8, "top_p": 0.95, "seed": i})
        for i, ids in enumerate(fitting)
    ]
    return greedy + sampled


def random_requests(pair: LoadedPair, count: int, tokens: int, seed: int) -> list[Asked]:
    generator = torch.Generator().manual_seed(seed)
    size = (count, SHAPE_PROMPT)
    prompts = torch.randint(0, pair.target.vocab_size - 1, size, generator=generator)
    limits = {"max_tokens": tokens, "ignore_eos": True}
    return [Asked(ids, limits) for ids in prompts.tolist()]


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
    asked = real_requests(pair, options, options.tokens)
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
    asked = random_requests(pair, options.batch, options.shape_tokens, seed=0)
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


def real_price(report: PartReport, pair: LoadedPair, options: argparse.Namespace) -> None:
    """The shipped pair, with its own acceptance and with a forced one."""
    requests = real_requests(pair, options, options.price_tokens)
    asked = requests[: len(requests) // 2]  # greedy
    random.Random(1).shuffle(asked)
    price_load = PriceLoad(asked, {1: 16, 8: 32, 64: 128}, options.repeats)
    draftings = chosen_draftings((NONE, Drafting("p-eagle", 7), *DRAFTINGS[-2:]), options)
    measure_price(report, options.pair, pair, draftings, options.acceptance.split(","), price_load)


def shape_price(report: PartReport, pair: LoadedPair, options: argparse.Namespace) -> None:
    """Random weights, whose drafts are accepted as those of a trained drafter would be."""
    asked = random_requests(pair, 128, options.shape_tokens, seed=1)
    price_load = PriceLoad(asked, {1: 2, 8: 16, 64: 128}, options.repeats)
    default = DRAFTINGS if options.draftings else (NONE, Drafting("p-eagle", 7))
    draftings = chosen_draftings(default, options)
    measure_price(report, options.shape, pair, draftings, ["forced"], price_load)


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
    parser.add_argument("--price-tokens", type=int, default=128, help="of an answer of `price`")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each mode")
    parser.add_argument("--acceptance", default="natural,forced", help="of `price`")
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
            report.run("price", lambda: real_price(report, pair, options))
        del pair
    if {"shape", "shape price"} & set(parts) and report.has_time:
        shaped = random_pair(options.shape, options.device, getattr(torch, options.dtype))
        if "shape" in parts:
            report.run("shape", lambda: shape_part(report, shaped, options))
        if "shape price" in parts:
            report.run("shape price", lambda: shape_price(report, shaped, options))


if __name__ == "__main__":
    main()

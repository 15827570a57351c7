"""Milliseconds of a step in the fast and in exact mode, by draft shape; random weights.

    python -m benchmarks.exact.steps OUT [--shape smollm2-135m] [--shapes 7,7x15,11x31]
        [--loads 1,8,64] [--tokens 48] [--seconds 120] [--kernels]

A shape is K, or K x nodes of a tree. Random drafts are hardly ever accepted, so both modes do the
same work, and the ratio of their steps is the price of exact mode for this shape. `--kernels` adds
the microseconds of each kernel in a step with one request.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.exact.engines import CONTEXT, SHAPE_PROMPT, Asked, Drafting, engine_of, measure
from benchmarks.exact.part_report import PartReport
from peagle.bench.random_models import random_pair
from peagle.engine import Engine

PROFILED_STEPS = 20


def parse_shape(word: str) -> Drafting:
    k, _, nodes = word.partition("x")
    if k == "0":
        return Drafting("none")
    return Drafting("p-eagle", int(k), int(nodes or 0))


def step_ms(engine: Engine, asked: list[Asked], load: int) -> float:
    """The faster of two runs, each with twice as many requests as run at a time."""
    repeated = [asked[i % len(asked)] for i in range(2 * load)]
    return min(measure(engine, repeated, load).step_ms for _ in range(2))


def kernel_times(engine: Engine, asked: Asked) -> dict[str, tuple[float, float]]:
    """Launches and microseconds in a step with one request, by kernel."""
    engine.add(asked.ids, **asked.options)
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.busy:
        engine.step()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_time > 0:
            times[event.name[:60]].append(event.device_time)
    return {
        name: (len(x) / PROFILED_STEPS, round(sum(x) / PROFILED_STEPS, 1))
        for name, x in sorted(times.items(), key=lambda item: -sum(item[1]))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--shapes", default="7,7x15,11x31")
    parser.add_argument("--loads", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    report = PartReport(options.out / f"exact_steps-{options.shape}.json", options.seconds)
    loads = [int(word) for word in options.loads.split(",")]
    pair = random_pair(options.shape, options.device, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, pair.target.vocab_size - 1, (64, SHAPE_PROMPT), generator=generator)
    limits = {"max_tokens": options.tokens, "ignore_eos": True}
    asked = [Asked(ids, limits) for ids in prompts.tolist()]
    assert SHAPE_PROMPT + options.tokens < CONTEXT
    for drafting in map(parse_shape, options.shapes.split(",")):
        milliseconds: dict[bool, list[float]] = {}
        for exact in (False, True):
            if not report.has_time:
                return
            started = time.perf_counter()
            engine = engine_of(pair, drafting, exact, max_batch=max(loads))
            engine.warm_up()
            measure(engine, asked[:2], 1)
            milliseconds[exact] = [step_ms(engine, asked, load) for load in loads]
            if options.kernels:
                kernels = kernel_times(engine, asked[0])
                report.add(drafting=drafting.name, exact=exact, kernels=kernels)
            engine.close()
            print(f"{time.perf_counter() - started:.1f} s", flush=True)
        fast, slow = milliseconds[False], milliseconds[True]
        report.add(
            shape=options.shape,
            drafting=drafting.name,
            loads=loads,
            fast_ms=[round(x, 3) for x in fast],
            exact_ms=[round(x, 3) for x in slow],
            percent=[round(100 * (b / a - 1), 1) for a, b in zip(fast, slow, strict=True)],
        )


if __name__ == "__main__":
    main()

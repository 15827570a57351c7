"""How long `Engine.replace_drafter` keeps an engine from its next step, under load.

    python -m benchmarks.learning.swap_pause [--pair smollm2-135m] [--method p-eagle] [--requests 8]

The engine's own thread answers requests while this one replaces the drafter by another version and
back. The table has the duration of a swap, the part of it in which no step can run, and tokens per
second with and without swaps.
"""

import argparse
import time
from statistics import median

from peagle.core import parse_method
from peagle.drafter.replacement import private_copy
from peagle.engine import Engine, EngineConfig
from peagle.engine.step.stepper import Stepper
from peagle.loaded import load

PROMPT = "Write a long story about a lighthouse keeper, request {}."


def tokens_per_second(engine: Engine, requests: int, tokens: int) -> float:
    started = time.perf_counter()
    streams = [
        engine.add(PROMPT.format(i), max_tokens=tokens, ignore_eos=True) for i in range(requests)
    ]
    for stream in streams:
        for _ in stream:
            pass
    return requests * tokens / (time.perf_counter() - started)


class TimedStepper:
    """Records how long the step lock is held for each swap."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.original = Stepper.replace_drafter

    def install(self) -> None:
        def replace_drafter(stepper: Stepper, *args: object) -> None:
            started = time.perf_counter()
            self.original(stepper, *args)  # type: ignore[arg-type]
            self.seconds.append(time.perf_counter() - started)

        Stepper.replace_drafter = replace_drafter  # type: ignore[method-assign,assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--method", default="p-eagle", type=parse_method)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--swaps", type=int, default=20)
    options = parser.parse_args()
    pair = load(options.pair)
    first = pair.drafter(options.method)
    second = private_copy(first, pair.target)
    for parameter in second.parameters():
        parameter.data.mul_(1.001)
    timed = TimedStepper()
    timed.install()
    config = EngineConfig(method=options.method, k=7, max_batch=options.requests)
    with Engine(pair, config) as engine:
        engine.warm_up()
        tokens_per_second(engine, options.requests, options.tokens)
        plain = tokens_per_second(engine, options.requests, options.tokens)
        streams = [
            engine.add(PROMPT.format(i), max_tokens=options.tokens, ignore_eos=True)
            for i in range(options.requests)
        ]
        started = time.perf_counter()
        calls = []
        for i in range(options.swaps):
            call = time.perf_counter()
            engine.replace_drafter(first if i % 2 else second, version=i + 1)
            calls.append(time.perf_counter() - call)
        pieces = [piece for stream in streams for piece in stream]
        swapped = options.requests * options.tokens / (time.perf_counter() - started)
        assert sum(piece.reason is not None for piece in pieces) == options.requests
    print("| swap, ms | no step can run, ms | tokens/s | with swaps |\n|--:|--:|--:|--:|")
    print(
        f"| {1000 * median(calls):.1f} | {1000 * median(timed.seconds):.2f}"
        f" (most {1000 * max(timed.seconds):.2f}) | {plain:.0f} |"
        f" {swapped:.0f} ({options.swaps} swaps) |"
    )


if __name__ == "__main__":
    main()

"""Measure draft shapes against plain decoding, one request at a time.

    python -m benchmarks.engine.draft_shapes DATA [TOKENS [PROMPTS]]

DATA is the folder with humaneval.jsonl. The shapes are chains, trees and adaptive drafting. All
engines run in turn, three times; the first time is the warm-up, and the faster one of the others
counts.
"""

import sys
import time
from pathlib import Path
from typing import Any

from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.loaded import load

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    **{f"K={k}": {"k": k, "tree": 0} for k in (3, 5, 7)},
    "tree 15, K=7": {"k": 7, "tree": 15},
    "tree 31, K=7": {"k": 7, "tree": 31},
    "adaptive, chains": {"tree": 0},
    "adaptive, trees": {"tree": 31},
}
REPEATS = 3


def tokens_per_second(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    before = engine.metrics.generated_tokens
    started = time.perf_counter()
    for ids in prompts:
        engine.add(ids, max_tokens=max_tokens)
        engine.drain()
    return (engine.metrics.generated_tokens - before) / (time.perf_counter() - started)


def main(data: str, max_tokens: int = 64, num_prompts: int = 8) -> None:
    pair = load()
    tasks = read_sets(["humaneval"], Path(data), num_prompts)["humaneval"]
    prompts = [pair.encode(task.turns[0]) for task in tasks]
    kv_tokens = max(map(len, prompts)) + max_tokens + 128
    engines = {}
    for name, options in OPTIONS.items():
        config = EngineConfig(
            max_batch=1,
            kv_tokens=kv_tokens,
            exact=False,  # Without kernels for it, only chains would be exact.
            thread=False,
            prefix_caching=False,
            **options,
        )
        engines[name] = Engine(pair, config)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            rates[name].append(tokens_per_second(engine, prompts, max_tokens))
    plain = max(rates["none"][1:])
    for name, engine in engines.items():
        best = max(rates[name][1:])
        nodes = dict(engine.metrics.k_steps.most_common(4))
        length = engine.metrics.acceptance_length
        print(
            f"{name:18} {best:8.1f} tokens/s  x {best / plain:.2f}"
            f"  acceptance length {length:.2f}  nodes {nodes}"
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
